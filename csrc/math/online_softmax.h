// Log-prob, log-sum-exp and entropy of a row of logits read once, in pieces of any size and order.
//
//   partial of a set of logits:  max = max z,  sum = Σ exp(z - max),  weighted = Σ exp(z - max) (z - max)
//   combine:                     the partial of the union; associative up to rounding, commutative to the bit
//   finalize:                    logprob = -softplus(lse_others - z_t),  entropy = log sum - weighted / sum
//
// The target's logit stays out of the partial until finalize: 1 - p_t then keeps its digits as p_t -> 1, where
// z_t - lse would round to 0. A logit of -inf has probability 0. A NaN or +inf logit makes the row NaN, as does a row
// without a finite logit; torch.log_softmax does the same.
#pragma once

#include <cmath>

#include "scalar.h"

namespace fastgrpo {

template <typename T>
struct SoftmaxPartial {
  T max = -kInfinity<T>;
  T sum = T(0);
  T weighted = T(0);
};

template <typename T>
struct SoftmaxResult {
  T logprob;
  T lse;
  T entropy;
};

// The partial of a single logit.
template <typename T>
FASTGRPO_HD inline SoftmaxPartial<T> softmax_element(T logit) {
  if (logit == -kInfinity<T>) return {};
  return {logit, T(1) + (logit - logit), T(0)};  // the sum is NaN for NaN and for inf: inf - inf
}

// The same partial relative to a maximum at least as large as its own.
template <typename T>
FASTGRPO_HD inline SoftmaxPartial<T> rescale(const SoftmaxPartial<T>& partial, T max) {
  const T shift = partial.max == max ? T(0) : partial.max - max;  // two empty partials: -inf - -inf
  const T scale = std::exp(shift);
  const T sum = scale * partial.sum;
  // Where the scale underflows, shift may be -inf: 0 * -inf must not reach the result, a NaN in the sum must.
  return {max, sum, scale > T(0) ? scale * (partial.weighted + shift * partial.sum) : sum};
}

template <typename T>
FASTGRPO_HD inline SoftmaxPartial<T> combine(const SoftmaxPartial<T>& a, const SoftmaxPartial<T>& b) {
  const bool ordered = a.max >= b.max;
  // Copies: a choice between references would live in local memory.
  const SoftmaxPartial<T> high{ordered ? a.max : b.max, ordered ? a.sum : b.sum, ordered ? a.weighted : b.weighted};
  const SoftmaxPartial<T> low{ordered ? b.max : a.max, ordered ? b.sum : a.sum, ordered ? b.weighted : a.weighted};
  const SoftmaxPartial<T> lowered = rescale(low, high.max);
  return {high.max, high.sum + lowered.sum, high.weighted + lowered.weighted};
}

template <typename T>
FASTGRPO_HD inline SoftmaxPartial<T> push(const SoftmaxPartial<T>& partial, T logit) {
  return combine(partial, softmax_element(logit));
}

// log(1 + exp(x)) without overflow and without losing small results.
template <typename T>
FASTGRPO_HD inline T softplus(T x) {
  return x > T(0) ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
}

// `others`: the partial of all logits of the row but the target's.
template <typename T>
FASTGRPO_HD inline SoftmaxResult<T> finalize(const SoftmaxPartial<T>& others, T target_logit) {
  const SoftmaxPartial<T> all = push(others, target_logit);
  const T log_sum = std::log(all.sum);
  // (max - z_t) + log(sum), not (max + log(sum)) - z_t: the difference of two logits near 1e4 is exact.
  const T odds = (others.max - target_logit) + std::log(others.sum);
  const T poison = all.sum - all.sum;  // 0, or NaN for a row with a NaN or +inf logit
  return {poison - softplus(odds), all.max + log_sum, log_sum - all.weighted / all.sum};
}

// 1 - p_t, exact as p_t -> 1.
template <typename T>
FASTGRPO_HD inline T target_complement(T logprob) {
  return -std::expm1(logprob);
}

}  // namespace fastgrpo
