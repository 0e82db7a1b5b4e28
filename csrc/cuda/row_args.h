// What the row kernels work on, as plain pointers and sizes: csrc/ops.cpp fills it from tensors, the kernels read it.
#pragma once

#include <cstdint>

#include "../math/objective.h"

namespace fastgrpo {

enum class GradDtype : int { bfloat16, float16 };

enum class LogitsDtype : int { float32, bfloat16, float16 };

// What a row's gradient is multiplied by.
enum class Coefficients : int {
  one,        // d logprob, and d entropy into `second_grad`
  given,      // grad_logprobs * d logprob + grad_entropy * d entropy, statistics as saved
  objective,  // the derivative of the GRPO objective in the log-prob, and the entropy's weight
};

// Every pointer is to device memory; "or null" says which may be missing. [rows] arrays are contiguous fp32.
struct RowArgs {
  // Products z = hidden . weight, [rows, columns] fp32 (or see logits_dtype): 16-byte aligned rows, a multiple of 4 elements apart, with at
  // least `columns` rounded up to 4 elements each. logit = softcap(logit_scale * (z + bias)) / temperature.
  float* logits;
  std::int64_t logits_pitch;
  const float* bias;    // columns rounded up to 4, or null
  const void* targets;  // [rows]; outside [0, columns): an ignored row, all its results and gradients are 0
  bool targets_are_64_bit;
  int rows, columns;
  float temperature, logit_scale, softcap;  // softcap 0: none

  // Statistics: written, or with Coefficients::given read.
  float *logprobs, *lse, *entropy;  // entropy or null

  // Gradients of the products without the factor logit_scale / temperature, times grad_scale, 16 bit.
  Coefficients coefficients;
  GradDtype grad_dtype;
  float grad_scale;
  void *grad, *second_grad;                 // or null
  std::int64_t grad_pitch, second_pitch;    // elements from row to row
  const float *grad_logprobs, *grad_entropy;  // given; either or null

  // Objective, see TokenInput.
  ObjectiveParams params;
  const float *advantages, *token_weights;
  const float *old_logprobs, *ref_logprobs, *multiplier, *phi, *entropy_weights;  // or null

  // 16-bit logits: for fastgrpo_row_streamed alone, with gradients of the same dtype.
  LogitsDtype logits_dtype;

  // Written, [rows] or null: float16 gradients of coefficients that are given or an objective's have each row's power of two
  // (csrc/math/row_power.h) taken out, and this is what undoes it and grad_scale; 0 for an ignored row.
  float* row_factors;
};

}  // namespace fastgrpo

// Each returns the runtime's code, 0 for success. `stream` is a cudaStream_t or hipStream_t on the current device.
extern "C" {
// Reads a row twice where a gradient and the statistics are wanted, else once; any device. `grad` may lie over the first
// half of `logits` (the same pointer, twice the pitch), or over 16-bit logits (the same pitch); `second_grad` must not overlap
// `logits`.
int fastgrpo_row_streamed(const fastgrpo::RowArgs* args, void* stream);
// Reads a row once; thread block clusters. `second_grad` may lie over the second half of each row as well.
int fastgrpo_row_cluster(const fastgrpo::RowArgs* args, void* stream);
// Whether a device runs fastgrpo_row_cluster for rows of this length; -1 where it has no memory to tell.
int fastgrpo_row_cluster_serves(int columns, int device);
}
