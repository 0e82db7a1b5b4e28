// What the targets alone give to the head's gradients, in fp32: the largest terms of both, which need not be rounded to 16 bit.
//
// finish_hidden_grad:  of hidden, a block a row: the others' sum times its factor, and the target's term; 4 + 4 bytes a value, and 2
//                      of the target's row of weight
// add_to_targets:      of weight, a block a row: it ends where an earlier row has the same target, else it adds up all that have it,
//                      in their order. 2 bytes a value, 4 + 4 for each row of the total, and the targets once or more for every row
// take_targets:        16-bit gradients of each row at the targets of all, a block a row: a sector of 32 bytes and 2 a value
// round_at_targets:    as add_to_targets where the total is rounded already: those of its rows are written anew from the others' sums in fp32;
//                      2 bytes a value, 4 + 2 for each row of the total, and the targets as often
#include "target_terms.h"

#include "../export.h"
#include "block.h"
#include "grad16.h"

namespace fastgrpo {
namespace {

constexpr int kThreads = 256;
using BFloat16 = Grad16<GradDtype::bfloat16>;

__device__ __forceinline__ float4 multiply_add(float by, const float4& x, const float4& y) {
  return {fmaf(by, x.x, y.x), fmaf(by, x.y, y.y), fmaf(by, x.z, y.z), fmaf(by, x.w, y.w)};
}

__device__ __forceinline__ float4 multiply(float by, const float4& x) { return {by * x.x, by * x.y, by * x.z, by * x.w}; }

__global__ void finish_hidden_grad(float* out, const float* factors, const float* at_target, const std::int64_t* targets,
                                   const void* weight, std::int64_t vocabulary, float scale, int width) {
  const std::int64_t row = blockIdx.x, target = targets[row];
  const bool has_target = target >= 0 && target < vocabulary;
  const float factor = scale * (factors == nullptr ? 1.f : factors[row]), term = has_target ? scale * at_target[row] : 0.f;
  auto* values = reinterpret_cast<float4*>(out + row * width);
  const auto* words = static_cast<const uint2*>(weight) + (has_target ? target : 0) * (width / 4);
  for (int i = threadIdx.x; i < width / 4; i += kThreads) {
    values[i] = has_target ? multiply_add(term, BFloat16::widen4(words[i]), multiply(factor, values[i])) : float4{0.f, 0.f, 0.f, 0.f};
  }
}

// `sums`: what other rows give to each row's target, and then `total` is bfloat16; null: `total` has it, in fp32.
template <bool kRounded>
__global__ void add_to_targets(void* total, const float* sums, const float* at_target, const std::int64_t* targets,
                               const void* hidden, std::int64_t vocabulary, float scale, int rows, int width) {
  __shared__ int matches[kThreads], slots[kThreads / kGroup];
  const int row = blockIdx.x;
  const std::int64_t target = targets[row];
  if (target < 0 || target >= vocabulary) return;
  int earlier = 0;
  for (int other = threadIdx.x; other < row; other += kThreads) earlier |= targets[other] == target;
  if (__syncthreads_or(earlier)) return;
  for (int first = 0; first < width / 4; first += kThreads) {
    const int place = first + threadIdx.x;
    float4 sum{0.f, 0.f, 0.f, 0.f};
    for (int start = row; start < rows; start += kThreads) {
      const int other = start + threadIdx.x;
      const int same = other < rows && targets[other] == target;
      if (!__syncthreads_or(same)) continue;
      int found;
      const int before = exclusive_scan_block<kThreads>(same, slots, found);
      if (same) matches[before] = other;
      __syncthreads();
      for (int i = 0; place < width / 4 && i < found; ++i) {
        const std::int64_t match = matches[i];
        const uint2 values = static_cast<const uint2*>(hidden)[match * (width / 4) + place];
        sum = multiply_add(scale * at_target[match], BFloat16::widen4(values), sum);
      }
      __syncthreads();
    }
    if (place < width / 4) {
      const std::int64_t into = target * (width / 4) + place;
      if constexpr (kRounded) {
        sum = multiply_add(1.f, sum, reinterpret_cast<const float4*>(sums)[static_cast<std::int64_t>(row) * (width / 4) + place]);
        static_cast<uint2*>(total)[into] = {BFloat16::round2(sum.x, sum.y), BFloat16::round2(sum.z, sum.w)};
      } else {
        float4& value = static_cast<float4*>(total)[into];
        value = multiply_add(1.f, sum, value);
      }
    }
  }
}

__global__ void take_targets(const std::uint16_t* values, std::int64_t pitch, const std::int64_t* targets, std::uint16_t* out,
                             std::int64_t out_pitch, int rows, int vocabulary) {
  const std::int64_t row = blockIdx.x;
#pragma unroll 4
  for (int column = threadIdx.x; column < rows; column += kThreads) {
    const std::int64_t target = targets[column];
    const bool has_target = target >= 0 && target < vocabulary;
    out[row * out_pitch + column] = has_target ? values[row * pitch + target] : std::uint16_t{0};
  }
}

}  // namespace
}  // namespace fastgrpo

FASTGRPO_EXPORT int fastgrpo_finish_hidden_grad(float* out, const float* factors, const float* at_target, const std::int64_t* targets,
                                                const void* weight, std::int64_t vocabulary, float scale, int rows, int width,
                                                void* stream) {
  using namespace fastgrpo;
  if (rows == 0 || width == 0) return 0;
  finish_hidden_grad<<<rows, kThreads, 0, static_cast<Stream>(stream)>>>(out, factors, at_target, targets, weight, vocabulary,
                                                                         scale, width);
  return launch_status();
}

FASTGRPO_EXPORT int fastgrpo_add_to_targets(float* total, const float* at_target, const std::int64_t* targets,
                                            const void* hidden, std::int64_t vocabulary, float scale, int rows, int width,
                                            void* stream) {
  using namespace fastgrpo;
  if (rows == 0 || width == 0) return 0;
  add_to_targets<false><<<rows, kThreads, 0, static_cast<Stream>(stream)>>>(total, nullptr, at_target, targets, hidden,
                                                                            vocabulary, scale, rows, width);
  return launch_status();
}

FASTGRPO_EXPORT int fastgrpo_round_at_targets(void* total, const float* sums, const float* at_target,
                                              const std::int64_t* targets, const void* hidden, std::int64_t vocabulary,
                                              float scale, int rows, int width, void* stream) {
  using namespace fastgrpo;
  if (rows == 0 || width == 0) return 0;
  add_to_targets<true><<<rows, kThreads, 0, static_cast<Stream>(stream)>>>(total, sums, at_target, targets, hidden, vocabulary,
                                                                           scale, rows, width);
  return launch_status();
}

FASTGRPO_EXPORT int fastgrpo_take_targets(const void* values, std::int64_t pitch, const std::int64_t* targets, void* out,
                                          std::int64_t out_pitch, int rows, int vocabulary, void* stream) {
  using namespace fastgrpo;
  if (rows == 0) return 0;
  take_targets<<<rows, kThreads, 0, static_cast<Stream>(stream)>>>(static_cast<const std::uint16_t*>(values), pitch, targets,
                                                                   static_cast<std::uint16_t*>(out), out_pitch, rows, vocabulary);
  return launch_status();
}
