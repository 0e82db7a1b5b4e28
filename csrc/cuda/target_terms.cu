// What the targets alone give to the head's gradients, in fp32: the largest terms of both, which need not be rounded to 16 bit.
//
// finish_hidden_grad:  of hidden, a block a row: the others' sum times its factor, and the target's term; 4 + 4 bytes a value, and 2
//                      of the target's row of weight
// add_to_targets:      of weight, a block a row: it ends where an earlier row has the same target, else it adds up all that have it,
//                      in their order. 2 bytes a value, 4 + 4 for each row of the total, and the targets once or more for every row
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

__global__ void add_to_targets(float* total, const float* at_target, const std::int64_t* targets, const void* hidden,
                               std::int64_t vocabulary, float scale, int rows, int width) {
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
      float4* into = reinterpret_cast<float4*>(total + target * width) + place;
      *into = multiply_add(1.f, sum, *into);
    }
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
  add_to_targets<<<rows, kThreads, 0, static_cast<Stream>(stream)>>>(total, at_target, targets, hidden, vocabulary, scale,
                                                                     rows, width);
  return launch_status();
}
