// What the kernel of merge.cu takes.
#pragma once

#include <cstdint>

#include "row_args.h"

// Returns the runtime's code, 0 for success. Pointers are to device memory, `stream` as in row_args.h.
extern "C" {
// Attention over two sets of keys from the attention over each: out, more [tokens, heads, width] contiguous and 16-byte
// aligned, width a multiple of 8; lse, more_lse, merged_lse [heads, tokens]. Where continued[token] is 0, out stays and
// merged_lse = lse. merged_lse must not overlap lse.
int fastgrpo_merge_attention(void* out, const float* lse, const void* more, const float* more_lse, const bool* continued,
                             float* merged_lse, fastgrpo::GradDtype dtype, int tokens, int heads, int width, void* stream);
}
