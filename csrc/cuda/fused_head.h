// What the kernels of fused_head.cu take.
#pragma once

#include <cstdint>

#include "row_args.h"

namespace fastgrpo {

// What a pass leaves beside the statistics of its rows. A row's gradient without its target, where it is 0, is 16 bit; what it is at
// the target is fp32.
enum class FusedPass : int {
  statistics,    // nothing
  exponentials,  // values E in `row.grad`, such that row_factors[r] E[r] is the row's gradient (coefficients one or objective)
  gradients,     // the gradients themselves in `row.grad` (coefficients given, statistics as saved)
};

// Every pointer is to device memory.
struct FusedHeadArgs {
  // Of `row`: no logits, no bias, no second gradient; logit_scale above 0; `grad` bfloat16, rows of which start at 16 bytes and are
  // written to the next multiple of 32 columns; no entropy_weights, and grad_entropy only where coefficients are given.
  RowArgs row;
  FusedPass pass;
  float* at_target;             // [rows], of rows with a target; null for statistics
  const void *hidden, *weight;  // [rows, width], [columns, width] bfloat16, contiguous, 16-byte aligned; width a multiple of 8

  // Scratch, for the first two passes.
  float4* partials;        // [strips, rows], see fastgrpo_fused_head_strips
  float* shifts2;          // [rows]
  float* target_products;  // [rows]
  int* repeat;             // [1]
  int width;
};

}  // namespace fastgrpo

extern "C" {
// Returns the runtime's code, 0 for success; `stream` as in row_args.h.
int fastgrpo_fused_head(const fastgrpo::FusedHeadArgs* args, void* stream);
// Strips that a row is cut into.
int fastgrpo_fused_head_strips(int columns);
// Whether a device runs it; -1 where it has no memory to tell.
int fastgrpo_fused_head_serves(int device);
}
