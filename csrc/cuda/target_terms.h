// What the kernels of target_terms.cu take.
#pragma once

#include <cstdint>

extern "C" {
// Each returns the runtime's code, 0 for success; `stream` as in row_args.h. Of [rows]: targets of 64 bits, outside
// [0, vocabulary) where a row has none; at_target fp32. width: a multiple of 4; every matrix is contiguous and starts at 16 bytes.

// out [rows, width] fp32 = scale (factors out + at_target weight[targets]), 0 without a target; weight [vocabulary, width] bfloat16, factors [rows] or null for 1.
int fastgrpo_finish_hidden_grad(float* out, const float* factors, const float* at_target, const std::int64_t* targets, const void* weight,
                         std::int64_t vocabulary, float scale, int rows, int width, void* stream);
// total [vocabulary, width] fp32: total[targets[r]] += scale at_target[r] hidden[r] for every r, in their order; hidden [rows, width] bfloat16.
int fastgrpo_add_to_targets(float* total, const float* at_target, const std::int64_t* targets, const void* hidden,
                            std::int64_t vocabulary, float scale, int rows, int width, void* stream);
// out [rows, rows]: out[r, q] = values[r, targets[q]], 0 without a target; values [rows, vocabulary], of 16 bits as out. Elements
// from row to row: pitch, out_pitch.
int fastgrpo_take_targets(const void* values, std::int64_t pitch, const std::int64_t* targets, void* out, std::int64_t out_pitch,
                          int rows, int vocabulary, void* stream);
// total [vocabulary, width] bfloat16: total[targets[r]] = sums[r] + the sum of scale at_target[q] hidden[q] over rows q of the same target, for every r;
// sums [rows, width] fp32, equal where targets are.
int fastgrpo_round_at_targets(void* total, const float* sums, const float* at_target, const std::int64_t* targets,
                              const void* hidden, std::int64_t vocabulary, float scale, int rows, int width, void* stream);
}
