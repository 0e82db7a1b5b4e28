// What the kernel of rotary.cu takes.
#pragma once

#include <cstdint>

#include "row_args.h"

// Returns the runtime's code, 0 for success. Pointers are to device memory, 16-byte aligned, `stream` as in row_args.h.
extern "C" {
// Rotary positions of queries and keys [tokens, heads, width], contiguous, width a multiple of 16; cos, sin [tokens, width].
// `transposed`: the transposed rotation, which is what gradients need.
int fastgrpo_rotary(const void* query, const void* key, const void* cos, const void* sin, void* out_query, void* out_key,
                    fastgrpo::GradDtype dtype, int tokens, int query_heads, int key_heads, int width, bool transposed,
                    void* stream);
}
