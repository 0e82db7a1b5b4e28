// What the scaling kernels of scale.cu take.
#pragma once

#include <cstdint>

#include "row_args.h"

// Each returns the runtime's code, 0 for success. Pointers are to device memory, `stream` as in row_args.h.
extern "C" {
// out[i] = round(factor[0] * values[i]), i < count; values and out 16-byte aligned.
int fastgrpo_scale_round(const float* values, const float* factor, void* out, fastgrpo::GradDtype dtype, std::int64_t count,
                         void* stream);
// out[r, :] = round(g[r] * u[r, :] + h[r] * v[r, :]), [rows, width] contiguous; exactly 0 for a factor of 0, and for a row
// whose target lies outside [0, vocabulary). g with u, or h with v, may be null.
int fastgrpo_weigh_slopes(const float* g, const float* u, const float* h, const float* v, const std::int64_t* targets,
                          std::int64_t vocabulary, void* out, fastgrpo::GradDtype dtype, int rows, int width, void* stream);
// out [rows, width] = factors values, rounded once; both bfloat16, contiguous and at 16 bytes, width a multiple of 4; factors [rows].
int fastgrpo_scale_rows(const void* values, const float* factors, void* out, int rows, int width, void* stream);
}
