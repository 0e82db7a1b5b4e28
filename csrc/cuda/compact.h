// What the kernel of compact.cu takes.
#pragma once

#include <cstdint>

namespace fastgrpo {

// Every pointer is to device memory.
struct CompactArgs {
  const void* targets;  // [rows]
  bool targets_are_64_bit;
  std::int64_t rows, vocabulary;    // rows below 2^31
  const float *first, *second;      // [rows] or null: a row is wanted where one of them is not 0; without both, every row is
  std::int64_t *wanted, *others;    // [rows] each; others or null
  const std::int64_t* valid;        // [1] or null: 0 where there is no telling, and then `counts` is -1
  std::int64_t* counts;             // [1]: of wanted in the lower half, of others in the upper: one number to copy
};

}  // namespace fastgrpo

// Returns the runtime's code, 0 for success; `stream` as in row_args.h.
extern "C" int fastgrpo_compact(const fastgrpo::CompactArgs* args, void* stream);
