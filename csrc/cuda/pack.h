// What the kernels of pack.cu take. Every pointer is to device memory.
#pragma once

#include <cstdint>

namespace fastgrpo {

struct LeftPackArgs {
  const void* mask;  // [rows, width], contiguous
  int mask_bytes;    // of an element: 1, 4 or 8
  int rows, width;
  std::int64_t* index;   // [rows, width]
  std::int64_t* counts;  // [rows]
};

struct TakeRowsArgs {
  const void* values;             // rows of row_bytes, one behind the other
  const std::int64_t* rows;       // [count]; negative: a row of the pattern
  void* out;                      // [count] rows of row_bytes
  std::int64_t count, row_bytes;
  std::uint64_t pattern;          // 8 bytes of the fill value, repeated
};

enum class RowDtype : int { float32, bfloat16, float16 };

struct SumRowsArgs {
  const void* grads;          // [*, width]
  const std::int64_t* order;  // places of `grads`, those of one row together
  const std::int64_t* start;  // [rows + 1]: row r sums grads[order[start[r]]] .. grads[order[start[r + 1] - 1]]
  void* out;                  // [rows, width]
  RowDtype dtype;
  std::int64_t rows;
  int width;
};

}  // namespace fastgrpo

// Each returns the runtime's code, 0 for success; `stream` as in row_args.h.
extern "C" {
int fastgrpo_left_pack(const fastgrpo::LeftPackArgs* args, void* stream);
int fastgrpo_take_rows(const fastgrpo::TakeRowsArgs* args, void* stream);
int fastgrpo_sum_rows(const fastgrpo::SumRowsArgs* args, void* stream);
}
