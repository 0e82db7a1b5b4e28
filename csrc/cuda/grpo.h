// What the kernels of grpo.cu take: the rows of a micro-batch, sequence after sequence.
#pragma once

#include <cstdint>

#include "../math/objective.h"

namespace fastgrpo {

// What the sum over all tokens is divided by, before the accumulation steps.
enum class Normaliser : int {
  items,     // a number of items, given or counted, at least 1; times `factor`
  tokens,    // counted tokens, at least 1
  constant,  // `factor`
  sequence,  // counted tokens of the token's own sequence, at least 1, times the number of sequences
};

// Every pointer is to device memory; "or null" says which may be missing. [rows] and [sequences] arrays are contiguous fp32.
struct GrpoRowsArgs {
  const void* segments;  // [sequences + 1]: rows of sequence i are segments[i] .. segments[i + 1]
  bool segments_are_64_bit;
  const void* targets;  // [rows]
  bool targets_are_64_bit;
  std::int64_t rows, vocabulary;
  int sequences;
  const bool* mask;         // [rows] or null: 0 where a row counts for nothing
  const float* advantages;  // [sequences], or [rows]
  bool advantages_per_row;
  const float* sampler_ratio;  // [sequences], or [rows], or null
  bool sampler_ratio_per_row;

  // weight = 1 / denominator / accumulation on counted rows, 0 elsewhere; entropy weight = entropy_coef / tokens / accumulation.
  Normaliser normaliser;
  double factor, accumulation, items_factor, entropy_coef;
  const float* items;  // [1], or null: tokens * items_factor
  // vespo's phi, where `phi` is wanted.
  double k_pos, lambda_pos, k_neg, lambda_neg;

  // Written. [rows]; multiplier, phi and entropy_weights or null, phi_of_sequence [sequences] or null.
  std::int64_t* counted_targets;  // the target, or -1 for a row that counts for nothing
  float *row_advantages, *weights, *multiplier, *phi, *entropy_weights, *phi_of_sequence;
  std::int64_t* sizes;  // [5]: first and last of segments, shortest and longest sequence; 1 where they cover the rows in order
};

// Columns of the sums, in the order of fastgrpo/row_local.py.
enum GrpoSum : int { sum_loss, sum_policy, sum_kl, sum_entropy, sum_low, sum_high, sum_region, sum_capped, sum_phi, kGrpoSums };

struct GrpoSumsArgs {
  const void* segments;  // [sequences + 1], or null: parts of about one size
  bool segments_are_64_bit;
  std::int64_t rows;
  int sequences;
  const std::int64_t* counted_targets;  // [rows], negative where a row counts for nothing
  ObjectiveParams params;
  double policy_scale;
  bool sequence_level;  // clip flags are one a sequence, and so are their counts
  const float *logprobs, *advantages, *weights;                                      // [rows]
  const float *entropy, *old_logprobs, *ref_logprobs, *multiplier, *phi, *entropy_weights;  // [rows] or null
  const float *sequence_advantages, *phi_of_sequence;                               // [sequences] or null

  double* partials;  // [sequences, kGrpoSums + 1]
  float* sums;       // [kGrpoSums, 2]: sum and count
  float* clips;      // [2, sequences]: clipped fraction of every sequence, low and high; NaN without a token
};

}  // namespace fastgrpo

// Each returns the runtime's code, 0 for success; `stream` as in row_args.h.
extern "C" {
int fastgrpo_grpo_rows(const fastgrpo::GrpoRowsArgs* args, void* stream);
int fastgrpo_grpo_sums(const fastgrpo::GrpoSumsArgs* args, void* stream);
}
