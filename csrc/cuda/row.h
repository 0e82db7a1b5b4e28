// What both row kernels do with a row of logits; the formulas beside the code that evaluates them.
//
//   e_j = exp(z_j - shift),  shift = max z (or the saved log-sum-exp),  total = sum e_j
//   g d logprob/dz_j + h d entropy/dz_j = g (1[j = t] - p_j) - h p_j (log p_j + entropy)          p_j = e_j / total
//     = e_j (a + b (z_j - shift)) for j != t,  a = -(g + h (entropy - log total)) / total,  b = -h / total
//     = g (1 - p_t) - h p_t (log p_t + entropy) for j = t, with 1 - p_t = -expm1(logprob)
//   times 1 - tanh^2 of a softcap.
//
// e_j is 2^d_j with d_j = z_j log2 e - shift log2 e from one fused multiply-add: only shift log2 e is rounded before, alike for
// every j, which costs log probs 2^-24 |shift|; ex2 adds 2 units in the last place. Sums weighted with d_j, and b, are in
// units of log 2.
#pragma once

#include <cmath>

#include "../math/online_softmax.h"
#include "../math/row_power.h"
#include "grad16.h"
#include "ptx.h"
#include "row_args.h"

namespace fastgrpo {

constexpr int kLanes = 32;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLog2 = 0.6931471805599453f;
// exp() of these is 0, and their product with 0 is 0, which -inf's is not. The second stands in for logits of -inf; its square, and
// its product with a slope of 10^23, are finite.
constexpr float kExpIsZero = -1.0e5f;
constexpr float kNoLogit = -1.0e15f;

using Partial = SoftmaxPartial<float>;

// --- a row's logits, four at a time

struct Row {
  const float* logits;
  const float* bias;
  int columns;
  int target;
  int target_vector;   // that holds the target
  int tail_vector;     // that the end of the row cuts, or -1
  float scale;         // without a softcap: logit_scale / temperature
  float inner, outer;  // with one: logit = outer tanh(inner z)
  bool softcap;

  __device__ int vectors() const { return (columns + 3) / 4; }
};

// The target of a row, -1 for a row that is ignored.
__device__ __forceinline__ int target_of(const RowArgs& args, long long row) {
  const long long target = args.targets_are_64_bit ? static_cast<const long long*>(args.targets)[row]
                                                   : static_cast<const int*>(args.targets)[row];
  return target >= 0 && target < args.columns ? static_cast<int>(target) : -1;
}

// 16-bit logits behind the pointer of a Row.
template <LogitsDtype kLogits>
using Logits16 = Grad16<kLogits == LogitsDtype::float16 ? GradDtype::float16 : GradDtype::bfloat16>;

template <LogitsDtype kLogits>
__device__ __forceinline__ const float* row_start(const RowArgs& args, long long row) {
  if constexpr (kLogits == LogitsDtype::float32) {
    return args.logits + row * args.logits_pitch;
  } else {
    using Type = typename Logits16<kLogits>::Type;
    return reinterpret_cast<const float*>(reinterpret_cast<const Type*>(args.logits) + row * args.logits_pitch);
  }
}

template <LogitsDtype kLogits = LogitsDtype::float32>
__device__ __forceinline__ Row make_row(const RowArgs& args, long long row, int target) {
  const bool softcap = args.softcap > 0.f;
  return {row_start<kLogits>(args, row),
          args.bias,
          args.columns,
          target,
          target / 4,
          args.columns % 4 != 0 ? args.columns / 4 : -1,
          args.logit_scale / args.temperature,
          softcap ? args.logit_scale / args.softcap : 0.f,
          softcap ? args.softcap / args.temperature : 0.f,
          softcap};
}

template <LogitsDtype kLogits = LogitsDtype::float32>
__device__ __forceinline__ float4 load(const Row& row, int vector) {
  if constexpr (kLogits == LogitsDtype::float32) {
    return ptx::ld_streaming(reinterpret_cast<const float4*>(row.logits) + vector);
  } else {
    return Logits16<kLogits>::widen4(reinterpret_cast<const uint2*>(row.logits)[vector]);
  }
}

__device__ __forceinline__ float4 no_logits() { return {kNoLogit, kNoLogit, kNoLogit, kNoLogit}; }

// Products to logits in place, with no logit for the target, which stays out of the sums, and behind the end of the row.
__device__ __forceinline__ void to_logits(const Row& row, int vector, float4& z) {
  if (row.bias != nullptr) {
    const float4 bias = reinterpret_cast<const float4*>(row.bias)[vector];
    z.x += bias.x, z.y += bias.y, z.z += bias.z, z.w += bias.w;
  }
  if (row.softcap) {
    z.x = row.outer * tanhf(row.inner * z.x), z.y = row.outer * tanhf(row.inner * z.y);
    z.z = row.outer * tanhf(row.inner * z.z), z.w = row.outer * tanhf(row.inner * z.w);
  } else {
    z.x *= row.scale, z.y *= row.scale, z.z *= row.scale, z.w *= row.scale;
  }
  z.x = ptx::max_nan(z.x, kNoLogit), z.y = ptx::max_nan(z.y, kNoLogit);
  z.z = ptx::max_nan(z.z, kNoLogit), z.w = ptx::max_nan(z.w, kNoLogit);
  if (vector == row.target_vector || vector == row.tail_vector) {
    const int first = 4 * vector;
    if (first == row.target) z.x = kNoLogit;
    if (first + 1 == row.target || first + 1 >= row.columns) z.y = kNoLogit;
    if (first + 2 == row.target || first + 2 >= row.columns) z.z = kNoLogit;
    if (first + 3 == row.target || first + 3 >= row.columns) z.w = kNoLogit;
  }
}

template <LogitsDtype kLogits = LogitsDtype::float32>
__device__ __forceinline__ float target_product(const Row& row) {
  if constexpr (kLogits == LogitsDtype::float32) {
    return row.logits[row.target];
  } else {
    return Logits16<kLogits>::widen(reinterpret_cast<const typename Logits16<kLogits>::Type*>(row.logits)[row.target]);
  }
}

template <LogitsDtype kLogits = LogitsDtype::float32>
__device__ __forceinline__ float target_logit(const Row& row) {
  const float product = target_product<kLogits>(row) + (row.bias == nullptr ? 0.f : row.bias[row.target]);
  return row.softcap ? row.outer * tanhf(row.inner * product) : row.scale * product;
}

// --- statistics

__device__ __forceinline__ float max4(const float4& z) { return fmaxf(fmaxf(z.x, z.y), fmaxf(z.z, z.w)); }

// d_j, see above; `shift2` is shift log2 e.
__device__ __forceinline__ float difference2(float z, float shift2) { return fmaf(z, kLog2e, -shift2); }

// Adds a logit to sums relative to the shift. A NaN reaches the sum; no logit adds nothing.
__device__ __forceinline__ void add(float z, float shift2, float& sum, float& weighted2) {
  const float difference = difference2(z, shift2);
  const float e = ptx::ex2(difference);
  sum += e;
  weighted2 = fmaf(e, difference, weighted2);
}

__device__ __forceinline__ void add4(const float4& z, float shift2, float& sum, float& weighted2) {
  add(z.x, shift2, sum, weighted2);
  add(z.y, shift2, sum, weighted2);
  add(z.z, shift2, sum, weighted2);
  add(z.w, shift2, sum, weighted2);
}

// A partial from the largest of some logits and their sums; empty where there was no logit among them.
__device__ __forceinline__ Partial make_partial(float max, float sum, float weighted2) {
  if (max > kNoLogit) return {max, sum, weighted2 * kLog2};
  return {-kInfinity<float>, sum - sum, sum - sum};  // 0, or NaN where every logit was NaN
}

// The partial of the union of 32 lanes' partials, the same bits in every lane.
__device__ __forceinline__ Partial combine_lanes(Partial partial) {
  float max = partial.max;
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) max = fmaxf(max, ptx::shfl_xor(max, mask));
  partial = rescale(partial, max);
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    partial.sum += ptx::shfl_xor(partial.sum, mask);
    partial.weighted += ptx::shfl_xor(partial.weighted, mask);
  }
  return partial;
}

// A partial in shared memory, which takes no type with a constructor.
struct Slot {
  float max, sum, weighted;
};

// The partial of a block's partials, in the first 32 threads. `slots`: one a 32 threads, in shared memory.
template <int kThreads>
__device__ __forceinline__ Partial combine_block(const Partial& mine, Slot* slots) {
  static_assert(kThreads % kLanes == 0 && kThreads / kLanes <= kLanes, "one slot a lane of the first warp");
  const Partial joined = combine_lanes(mine);
  if (threadIdx.x % kLanes == 0) slots[threadIdx.x / kLanes] = {joined.max, joined.sum, joined.weighted};
  __syncthreads();
  Partial all;
  if (threadIdx.x < kThreads / kLanes) {
    const Slot slot = slots[threadIdx.x];
    all = {slot.max, slot.sum, slot.weighted};
  }
  return threadIdx.x < kLanes ? combine_lanes(all) : all;
}

// --- from statistics to the coefficients of a row

struct Slope {
  float a, b, at_target;
};

struct RowScalars {
  float shift2;
  Slope first, second;
};

__device__ __forceinline__ Slope slope_of(float g, float h, float logprob, float entropy, float total, float log_total) {
  const float inverse = 1.f / total;
  float at_target = g * target_complement(logprob);
  if (h != 0.f) {
    const float log_p = fmaxf(logprob, kExpIsZero);
    at_target -= h * expf(log_p) * (log_p + entropy);
  }
  return {-(g + h * (entropy - log_total)) * inverse, -h * inverse * kLog2, at_target};
}

__device__ __forceinline__ float at(const float* values, long long row, float missing) {
  return values == nullptr ? missing : values[row];
}

// float16: takes the power of two out of the coefficients of a row (`writer`: says so, by one thread).
template <GradDtype kDtype>
__device__ __forceinline__ void take_power_out(const RowArgs& args, long long row, bool writer, float& g, float& h) {
  if constexpr (kDtype == GradDtype::float16) {
    if (args.row_factors == nullptr) return;
    const float power = row_power(g, h);
    if (power != 0.f) g /= power, h /= power;
    if (writer) args.row_factors[row] = power / args.grad_scale;
  }
}

template <GradDtype kDtype>
__device__ __forceinline__ RowScalars given_scalars(const RowArgs& args, long long row, bool writer) {
  float g = at(args.grad_logprobs, row, 0.f), h = at(args.grad_entropy, row, 0.f);
  take_power_out<kDtype>(args, row, writer, g, h);
  return {args.lse[row] * kLog2e, slope_of(g, h, args.logprobs[row], at(args.entropy, row, 0.f), 1.f, 0.f), {}};
}

// What a row's log-prob counts in the objective.
__device__ __forceinline__ float objective_coefficient(const RowArgs& args, long long row, float logprob) {
  const TokenInput<float> token{logprob,
                                at(args.old_logprobs, row, logprob),
                                at(args.ref_logprobs, row, 0.f),
                                args.advantages[row],
                                at(args.multiplier, row, 1.f),
                                at(args.phi, row, 1.f)};
  return args.token_weights[row] * token_term(args.params, token).grad;
}

// Writes the statistics of a row (`writer`: by one thread) and returns what its gradients need.
template <GradDtype kDtype>
__device__ __forceinline__ RowScalars finish_row(const RowArgs& args, long long row, const Partial& others, float z_target,
                                                 bool writer) {
  const Partial all = push(others, z_target);
  const SoftmaxResult<float> result = finalize(others, z_target);
  if (writer) {
    args.logprobs[row] = result.logprob;
    args.lse[row] = result.lse;
    if (args.entropy != nullptr) args.entropy[row] = result.entropy;
  }
  RowScalars scalars{all.max * kLog2e, {}, {}};
  if (args.grad == nullptr) return scalars;
  float g = 1.f, h = 0.f;
  if (args.coefficients == Coefficients::objective) {
    g = objective_coefficient(args, row, result.logprob);
    h = -at(args.entropy_weights, row, 0.f);
    take_power_out<kDtype>(args, row, writer, g, h);
  }
  const float log_total = std::log(all.sum);
  scalars.first = slope_of(g, h, result.logprob, result.entropy, all.sum, log_total);
  scalars.second = slope_of(0.f, 1.f, result.logprob, result.entropy, all.sum, log_total);
  return scalars;
}

// grad_scale, and at the target the slope of the softcap, which the other entries get as they are written.
__device__ __forceinline__ void apply_scale(const RowArgs& args, float z_target, RowScalars& scalars) {
  const float relative = args.softcap > 0.f ? z_target * (args.temperature / args.softcap) : 0.f;
  const float at_target = args.grad_scale * (1.f - relative * relative);
  scalars.first.a *= args.grad_scale, scalars.first.b *= args.grad_scale, scalars.first.at_target *= at_target;
  scalars.second.a *= args.grad_scale, scalars.second.b *= args.grad_scale, scalars.second.at_target *= at_target;
}

// --- gradients, four at a time

__device__ __forceinline__ float gradient(float z, float shift2, const Slope& slope) {
  const float difference = difference2(z, shift2);
  return ptx::ex2(difference) * fmaf(slope.b, difference, slope.a);
}

__device__ __forceinline__ float softcap_slope(float z, float inverse_outer) {
  const float relative = z * inverse_outer;
  return 1.f - relative * relative;
}

// `inverse_outer`: temperature / softcap.
template <GradDtype kDtype, bool kSoftcap>
__device__ __forceinline__ void store4(void* grads, int vector, const float4& z, float shift2, const Slope& slope,
                                       float inverse_outer) {
  float4 value{gradient(z.x, shift2, slope), gradient(z.y, shift2, slope), gradient(z.z, shift2, slope),
               gradient(z.w, shift2, slope)};
  if (kSoftcap) {
    value.x *= softcap_slope(z.x, inverse_outer), value.y *= softcap_slope(z.y, inverse_outer);
    value.z *= softcap_slope(z.z, inverse_outer), value.w *= softcap_slope(z.w, inverse_outer);
  }
  reinterpret_cast<uint2*>(grads)[vector] = {Grad16<kDtype>::round2(value.x, value.y),
                                             Grad16<kDtype>::round2(value.z, value.w)};
}

template <GradDtype kDtype>
__device__ __forceinline__ typename Grad16<kDtype>::Type* grad_row(void* grads, std::int64_t pitch, long long row) {
  return static_cast<typename Grad16<kDtype>::Type*>(grads) + row * pitch;
}

// Zero statistics and gradients, by all threads of the blocks of a row: `thread` of `threads`.
template <GradDtype kDtype>
__device__ __forceinline__ void write_ignored_row(const RowArgs& args, long long row, int thread, int threads) {
  if (thread == 0 && args.coefficients != Coefficients::given) {
    args.logprobs[row] = args.lse[row] = 0.f;
    if (args.entropy != nullptr) args.entropy[row] = 0.f;
  }
  if (kDtype == GradDtype::float16 && thread == 0 && args.row_factors != nullptr) args.row_factors[row] = 0.f;
  for (int vector = thread; 4 * vector < args.columns; vector += threads) {
    if (args.grad != nullptr) reinterpret_cast<uint2*>(grad_row<kDtype>(args.grad, args.grad_pitch, row))[vector] = {0, 0};
    if (args.second_grad != nullptr) {
      reinterpret_cast<uint2*>(grad_row<kDtype>(args.second_grad, args.second_pitch, row))[vector] = {0, 0};
    }
  }
}

}  // namespace fastgrpo
