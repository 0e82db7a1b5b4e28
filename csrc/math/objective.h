// The GRPO objective of one token with a token-level ratio, and its derivative in the log-prob, in closed form.
//
//   d = logprob - old_logprob,  c = exp(d),  gap = ref_logprob - logprob,  kl = exp(gap) - gap - 1  (times c if corrected)
//   loss = multiplier * policy(c, advantage) + beta * kl        (before the loss mask and the normaliser)
//
// The formulas are those of TRL 1.16 GRPOTrainer._compute_loss and of fastgrpo/objective.py, which the tests compare
// with, gradient included: torch.min halves the gradient at a tie, torch.clamp passes it on at its bounds.
// On-policy, old_logprob equals logprob by value; the ratio is 1 and still carries the gradient.
#pragma once

#include <cmath>

#include "scalar.h"

namespace fastgrpo {

// In the order of LOSS_TYPES in fastgrpo/objective.py.
enum class LossType : int { grpo, bnpo, dr_grpo, dapo, luspo, cispo, sapo, vespo };

// Options of a run, in double as Python holds them: 1 - epsilon is then rounded once, as torch rounds it.
struct ObjectiveParams {
  LossType loss_type = LossType::dapo;
  double epsilon_low = 0.2;
  double epsilon_high = 0.2;  // for cispo the cap on the ratio itself
  double delta = kInfinity<double>;
  double beta = 0.0;
  bool bias_correct_kl = true;
  double sapo_temperature_pos = 1.0;
  double sapo_temperature_neg = 1.05;
};

template <typename T>
struct TokenInput {
  T logprob;
  T old_logprob;
  T ref_logprob;  // not read where beta is 0
  T advantage;
  T multiplier;  // off-policy mask * entropy mask * sampler ratio; never multiplies the KL term
  T phi;         // read for vespo only
};

template <typename T>
struct TokenTerm {
  T loss;
  T grad;   // d loss / d logprob
  T ratio;  // after the delta clamp, as the clip metrics see it
  T kl;     // with its bias correction; 0 where beta is 0
  bool low_clipped;
  bool high_clipped;
  bool cispo_clipped;
};

// min(c, delta) * A against clamp(c, 1 - eps_low, 1 + eps_high) * A (PPO's clip; delta: arXiv:2505.07291).
template <typename T>
FASTGRPO_HD inline void clipped_policy(const ObjectiveParams& params, T advantage, T ratio, TokenTerm<T>& term) {
  const T low = T(1.0 - params.epsilon_low), high = T(1.0 + params.epsilon_high), delta = T(params.delta);
  const T bounded = ratio > delta ? delta : ratio;
  const T free_loss = bounded * advantage;
  const T clipped_loss = clamp(ratio, low, high) * advantage;
  const T free_share = free_loss < clipped_loss ? T(1) : (free_loss == clipped_loss ? T(0.5) : T(0));
  const T free_slope = ratio <= delta ? T(1) : T(0);
  const T clipped_slope = (ratio >= low && ratio <= high) ? T(1) : T(0);
  term.loss = -(clipped_loss < free_loss ? clipped_loss : free_loss);
  term.grad = -ratio * advantage * (free_share * free_slope + (T(1) - free_share) * clipped_slope);
  term.ratio = bounded;
  term.low_clipped = bounded < low && advantage < T(0);
  term.high_clipped = bounded > high && advantage > T(0);
}

// -min(c, cap).detach() * A * logprob (CISPO, arXiv:2506.13585).
template <typename T>
FASTGRPO_HD inline void cispo_policy(const ObjectiveParams& params, T advantage, T logprob, T ratio, TokenTerm<T>& term) {
  const T cap = T(params.epsilon_high);
  term.grad = -(ratio > cap ? cap : ratio) * advantage;
  term.loss = term.grad * logprob;
  term.cispo_clipped = ratio > cap && advantage > T(0);
}

// -sigmoid(tau (c - 1)) * 4 / tau * A (SAPO, arXiv:2511.20347).
template <typename T>
FASTGRPO_HD inline void sapo_policy(const ObjectiveParams& params, T advantage, T ratio, TokenTerm<T>& term) {
  const T tau = T(advantage > T(0) ? params.sapo_temperature_pos : params.sapo_temperature_neg);
  const T x = tau * (ratio - T(1));
  const T small = std::exp(-std::fabs(x));
  const T gate = (x >= T(0) ? T(1) : small) / (T(1) + small);
  const T slope = small / ((T(1) + small) * (T(1) + small));  // gate * (1 - gate), without the cancellation
  term.loss = -gate * T(4) / tau * advantage;
  term.grad = -T(4) * slope * ratio * advantage;
}

template <typename T>
FASTGRPO_HD inline TokenTerm<T> token_term(const ObjectiveParams& params, const TokenInput<T>& token) {
  const T ratio = std::exp(token.logprob - token.old_logprob);
  TokenTerm<T> term{};
  term.ratio = ratio;
  switch (params.loss_type) {
    case LossType::cispo:
      cispo_policy(params, token.advantage, token.logprob, ratio, term);
      break;
    case LossType::sapo:
      sapo_policy(params, token.advantage, ratio, term);
      break;
    case LossType::vespo:
      term.grad = -token.phi * token.advantage;
      term.loss = term.grad * token.logprob;
      break;
    default:
      clipped_policy(params, token.advantage, ratio, term);
  }
  term.loss *= token.multiplier;
  term.grad *= token.multiplier;
  if (params.beta != 0.0) {
    const T gap = token.ref_logprob - token.logprob;
    const T rise = std::expm1(gap);
    T kl = rise - gap, kl_grad = -rise;
    if (params.bias_correct_kl) {
      kl_grad = -ratio * gap;  // ratio * (kl - rise)
      kl *= ratio;
    }
    term.kl = kl;
    term.loss += T(params.beta) * kl;
    term.grad += T(params.beta) * kl_grad;
  }
  return term;
}

// One token's share of vespo's log w: d clamped, plus the clamped log of the sampler ratio where there is one.
template <typename T>
FASTGRPO_HD inline T vespo_log_ratio(T log_ratio) {
  return clamp(log_ratio, T(-20), T(20));
}

template <typename T>
FASTGRPO_HD inline T vespo_log_sampler(T sampler_ratio) {
  return clamp(T(std::log(sampler_ratio)), T(-18.420680743952367), T(20));  // log 1e-8
}

// phi = exp(lambda + k log w - lambda w), 0 where that is not finite (TRL 1.16 GRPOTrainer.get_gamma_weights).
template <typename T>
FASTGRPO_HD inline T vespo_phi(T log_w, T advantage, T k_pos, T lambda_pos, T k_neg, T lambda_neg) {
  const T log_weight = clamp(log_w, T(-18.420680743952367), T(20));
  const T k = advantage >= T(0) ? k_pos : k_neg;
  const T given = advantage >= T(0) ? lambda_pos : lambda_neg;
  const T lambda = given < T(1e-4) ? T(1e-4) : given;
  const T phi = std::exp(lambda + k * log_weight - lambda * std::exp(log_weight));
  return phi - phi == T(0) ? phi : T(0);
}

enum class SamplerClip : int { truncate, mask };

// Ratio of the old policy to the sampler's from its log (of a token, or summed over a sequence): clamped to
// [low, high], or 0 outside; a NaN log counts as 0 (TRL 1.16 GRPOTrainer._generate_and_score_completions).
template <typename T>
FASTGRPO_HD inline T sampler_ratio(T log_ratio, SamplerClip clip, T low, T high) {
  const T ratio = log_ratio == log_ratio ? T(std::exp(log_ratio)) : T(1);
  if (clip == SamplerClip::truncate) return clamp(ratio, low, high);
  return (ratio < low || ratio > high) ? T(0) : ratio;
}

}  // namespace fastgrpo
