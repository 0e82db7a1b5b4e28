// The gate of a transformer's MLP and its gradients: ../math/swiglu.h over arrays of one dtype. A thread takes 16 bytes of
// each, computes in fp32 and rounds once. 16 bit: 4 + 2 bytes a number forward, 6 + 4 backward, or 6 + 6 with the product.
#include "swiglu.h"

#include "../export.h"
#include "../math/swiglu.h"
#include "eight.h"

namespace fastgrpo {
namespace {

constexpr int kThreads = 256;

// 16 bytes of numbers as fp32.
template <RowDtype kDtype>
struct Piece {
  static constexpr GradDtype kRounded = kDtype == RowDtype::bfloat16 ? GradDtype::bfloat16 : GradDtype::float16;
  static constexpr int kCount = 8;
  float x[kCount];

  static __device__ __forceinline__ Piece load(const void* from, int i) {
    const Eight eight = widen<kRounded>(static_cast<const uint4*>(from)[i]);
    Piece piece;
#pragma unroll
    for (int j = 0; j < kCount; ++j) piece.x[j] = eight.x[j];
    return piece;
  }

  __device__ __forceinline__ void store(void* to, int i) const {
    Eight eight;
#pragma unroll
    for (int j = 0; j < kCount; ++j) eight.x[j] = x[j];
    static_cast<uint4*>(to)[i] = round8<kRounded>(eight);
  }
};

template <>
struct Piece<RowDtype::float32> {
  static constexpr int kCount = 4;
  float x[kCount];

  static __device__ __forceinline__ Piece load(const void* from, int i) {
    const float4 four = static_cast<const float4*>(from)[i];
    return {{four.x, four.y, four.z, four.w}};
  }

  __device__ __forceinline__ void store(void* to, int i) const {
    static_cast<float4*>(to)[i] = {x[0], x[1], x[2], x[3]};
  }
};

template <RowDtype kDtype>
__global__ void gate_forward(const void* gate, const void* up, void* product, int pieces) {
  using Numbers = Piece<kDtype>;
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= pieces) return;
  const Numbers g = Numbers::load(gate, i), u = Numbers::load(up, i);
  Numbers p;
#pragma unroll
  for (int j = 0; j < Numbers::kCount; ++j) p.x[j] = swiglu(g.x[j], u.x[j]);
  p.store(product, i);
}

template <RowDtype kDtype>
__global__ void gate_backward(const void* gate, const void* up, const void* grad, void* grad_gate, void* grad_up,
                              void* product, int pieces) {
  using Numbers = Piece<kDtype>;
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= pieces) return;
  Numbers g = Numbers::load(gate, i), u = Numbers::load(up, i), p = Numbers::load(grad, i);
#pragma unroll
  for (int j = 0; j < Numbers::kCount; ++j) {
    const SwigluGrad<float> found = swiglu_grad(g.x[j], u.x[j], p.x[j]);
    g.x[j] = found.gate, u.x[j] = found.up, p.x[j] = found.product;
  }
  g.store(grad_gate, i);
  u.store(grad_up, i);
  if (product != nullptr) p.store(product, i);
}

int pieces_of(RowDtype dtype, std::int64_t count) {
  return static_cast<int>(count / (dtype == RowDtype::float32 ? 4 : 8));
}

int blocks_of(int pieces) { return (pieces + kThreads - 1) / kThreads; }

}  // namespace
}  // namespace fastgrpo

FASTGRPO_EXPORT int fastgrpo_swiglu(const void* gate, const void* up, void* product, fastgrpo::RowDtype dtype,
                                    std::int64_t count, void* stream) {
  using namespace fastgrpo;
  if (count == 0) return 0;
  const auto kernel = dtype == RowDtype::float32    ? gate_forward<RowDtype::float32>
                      : dtype == RowDtype::bfloat16 ? gate_forward<RowDtype::bfloat16>
                                                    : gate_forward<RowDtype::float16>;
  const int pieces = pieces_of(dtype, count);
  kernel<<<blocks_of(pieces), kThreads, 0, static_cast<Stream>(stream)>>>(gate, up, product, pieces);
  return launch_status();
}

FASTGRPO_EXPORT int fastgrpo_swiglu_grad(const void* gate, const void* up, const void* grad, void* grad_gate, void* grad_up,
                                         void* product, fastgrpo::RowDtype dtype, std::int64_t count, void* stream) {
  using namespace fastgrpo;
  if (count == 0) return 0;
  const auto kernel = dtype == RowDtype::float32    ? gate_backward<RowDtype::float32>
                      : dtype == RowDtype::bfloat16 ? gate_backward<RowDtype::bfloat16>
                                                    : gate_backward<RowDtype::float16>;
  const int pieces = pieces_of(dtype, count);
  kernel<<<blocks_of(pieces), kThreads, 0, static_cast<Stream>(stream)>>>(gate, up, grad, grad_gate, grad_up, product, pieces);
  return launch_status();
}
