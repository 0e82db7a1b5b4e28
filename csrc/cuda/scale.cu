// The last step of a gradient: fp32 values times a factor that is known only now, rounded once to 16 bit.
//
// scale_round:   one factor for all; 4 + 2 bytes a value, four values a thread at a time
// weigh_slopes:  a factor a row and slope; 4 + 2 bytes a value, 8 + 2 with both slopes; a block a row
//
// And scale_rows: rows of bfloat16 times a factor each, before a product that sums over them; 2 + 2 bytes a value, a block a row
#include "scale.h"

#include "../export.h"
#include "row.h"

namespace fastgrpo {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 4096;

template <GradDtype kDtype>
__global__ void scale_round(const float* values, const float* factor, void* out, std::int64_t count) {
  const float by = *factor;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (std::int64_t i = first; i < count / 4; i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    const float4 value = ptx::ld_streaming(reinterpret_cast<const float4*>(values) + i);
    reinterpret_cast<uint2*>(out)[i] = {Grad16<kDtype>::round2(by * value.x, by * value.y),
                                        Grad16<kDtype>::round2(by * value.z, by * value.w)};
  }
  const std::int64_t rest = count / 4 * 4 + first;
  if (rest < count) static_cast<typename Grad16<kDtype>::Type*>(out)[rest] = Grad16<kDtype>::round(by * values[rest]);
}

template <GradDtype kDtype>
__global__ void weigh_slopes(const float* g, const float* u, const float* h, const float* v, const std::int64_t* targets,
                             std::int64_t vocabulary, void* out, int width) {
  const std::int64_t row = blockIdx.x;
  const bool counts = targets[row] >= 0 && targets[row] < vocabulary;
  const float by_u = counts ? at(g, row, 0.f) : 0.f, by_v = counts ? at(h, row, 0.f) : 0.f;
  auto* rounded = static_cast<typename Grad16<kDtype>::Type*>(out) + row * width;
  for (int column = threadIdx.x; column < width; column += kThreads) {
    float value = 0.f;
    if (by_u != 0.f) value += by_u * u[row * width + column];
    if (by_v != 0.f) value += by_v * v[row * width + column];
    rounded[column] = Grad16<kDtype>::round(value);
  }
}

__global__ void scale_rows(const void* values, const float* factors, void* out, int width) {
  using BFloat16 = Grad16<GradDtype::bfloat16>;
  const std::int64_t row = blockIdx.x, start = row * (width / 4);
  const float by = factors[row];
  for (int i = threadIdx.x; i < width / 4; i += kThreads) {
    const float4 value = BFloat16::widen4(static_cast<const uint2*>(values)[start + i]);
    static_cast<uint2*>(out)[start + i] = {BFloat16::round2(by * value.x, by * value.y),
                                           BFloat16::round2(by * value.z, by * value.w)};
  }
}

}  // namespace
}  // namespace fastgrpo

FASTGRPO_EXPORT int fastgrpo_scale_round(const float* values, const float* factor, void* out, fastgrpo::GradDtype dtype,
                                         std::int64_t count, void* stream) {
  using namespace fastgrpo;
  if (count == 0) return 0;
  const std::int64_t wanted = (count + 4 * kThreads - 1) / (4 * kThreads);
  const auto kernel = dtype == GradDtype::bfloat16 ? scale_round<GradDtype::bfloat16> : scale_round<GradDtype::float16>;
  kernel<<<wanted < kBlocks ? wanted : kBlocks, kThreads, 0, static_cast<Stream>(stream)>>>(values, factor, out, count);
  return launch_status();
}

FASTGRPO_EXPORT int fastgrpo_weigh_slopes(const float* g, const float* u, const float* h, const float* v,
                                          const std::int64_t* targets, std::int64_t vocabulary, void* out,
                                          fastgrpo::GradDtype dtype, int rows, int width, void* stream) {
  using namespace fastgrpo;
  if (rows == 0 || width == 0) return 0;
  const auto kernel = dtype == GradDtype::bfloat16 ? weigh_slopes<GradDtype::bfloat16> : weigh_slopes<GradDtype::float16>;
  kernel<<<rows, kThreads, 0, static_cast<Stream>(stream)>>>(g, u, h, v, targets, vocabulary, out, width);
  return launch_status();
}

FASTGRPO_EXPORT int fastgrpo_scale_rows(const void* values, const float* factors, void* out, int rows, int width, void* stream) {
  using namespace fastgrpo;
  if (rows == 0 || width == 0) return 0;
  scale_rows<<<rows, kThreads, 0, static_cast<Stream>(stream)>>>(values, factors, out, width);
  return launch_status();
}
