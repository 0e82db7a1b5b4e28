// Moving tokens: where each of a padded row goes, rows picked by an index, and the gradient of that.
//
//   left_pack   index[r, place] = column: real tokens first, padding behind them, both in order. A block a row: count, then
//               scan in rounds of kThreads. Reads the mask twice (the second time from a cache), writes 8 bytes an entry
//   take_rows   out[i, :] = values[rows[i], :], or the fill value where rows[i] < 0. Any dtype: whole bytes, as wide as rows and
//               pointers are aligned. 2 row_bytes a row
//   sum_rows    out[r, :] = sum of grads[order[k], :] over the k of row r, ascending, in fp32, rounded once: the same bits in
//               every run. A thread a column of a row; width * itemsize a summand
#include "pack.h"

#include <type_traits>

#include "../export.h"
#include "block.h"
#include "grad16.h"

namespace fastgrpo {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 8192;

template <typename Mask>
__global__ void __launch_bounds__(kThreads) left_pack(const __grid_constant__ LeftPackArgs args) {
  __shared__ int slots[kThreads / kGroup];
  const std::int64_t offset = static_cast<std::int64_t>(blockIdx.x) * args.width;
  const Mask* mask = static_cast<const Mask*>(args.mask) + offset;
  std::int64_t* index = args.index + offset;
  int mine = 0;
  for (int column = threadIdx.x; column < args.width; column += kThreads) mine += mask[column] != 0;
  const int count = sum_block<kThreads>(mine, slots);
  int before = 0;
  for (int base = 0; base < args.width; base += kThreads) {
    const int column = base + threadIdx.x;
    const bool real = column < args.width && mask[column] != 0;
    int total;
    const int reals = before + exclusive_scan_block<kThreads>(real, slots, total);
    if (column < args.width) index[real ? reals : count + column - reals] = column;
    before += total;
  }
  if (threadIdx.x == 0) args.counts[blockIdx.x] = count;
}

struct alignas(16) Bytes16 {
  std::uint64_t low, high;
};

template <typename Piece>
__device__ __forceinline__ Piece fill_of(std::uint64_t pattern) {
  if constexpr (std::is_same_v<Piece, Bytes16>) {
    return {pattern, pattern};
  } else {
    return static_cast<Piece>(pattern);
  }
}

template <typename Piece>
__global__ void __launch_bounds__(kThreads) take_rows(const __grid_constant__ TakeRowsArgs args) {
  const std::int64_t pieces = args.row_bytes / static_cast<std::int64_t>(sizeof(Piece)), total = args.count * pieces;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total; i += step) {
    const std::int64_t row = args.rows[i / pieces];
    static_cast<Piece*>(args.out)[i] =
        row < 0 ? fill_of<Piece>(args.pattern) : static_cast<const Piece*>(args.values)[row * pieces + i % pieces];
  }
}

__device__ __forceinline__ float load_float(const float* values, std::int64_t i) { return values[i]; }
__device__ __forceinline__ float load_float(const Grad16<GradDtype::bfloat16>::Type* values, std::int64_t i) {
  return Grad16<GradDtype::bfloat16>::widen(values[i]);
}
__device__ __forceinline__ float load_float(const Grad16<GradDtype::float16>::Type* values, std::int64_t i) {
  return Grad16<GradDtype::float16>::widen(values[i]);
}
__device__ __forceinline__ void store_float(float* out, float value) { *out = value; }
__device__ __forceinline__ void store_float(Grad16<GradDtype::bfloat16>::Type* out, float value) {
  *out = Grad16<GradDtype::bfloat16>::round(value);
}
__device__ __forceinline__ void store_float(Grad16<GradDtype::float16>::Type* out, float value) {
  *out = Grad16<GradDtype::float16>::round(value);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sum_rows(const __grid_constant__ SumRowsArgs args) {
  const T* grads = static_cast<const T*>(args.grads);
  const std::int64_t total = args.rows * args.width, step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total; i += step) {
    const std::int64_t row = i / args.width, column = i % args.width;
    float sum = 0.f;
    for (std::int64_t k = args.start[row]; k < args.start[row + 1]; ++k) {
      sum += load_float(grads, args.order[k] * args.width + column);
    }
    store_float(static_cast<T*>(args.out) + i, sum);
  }
}

unsigned blocks_for(std::int64_t items) {
  const std::int64_t wanted = (items + kThreads - 1) / kThreads;
  return static_cast<unsigned>(wanted < kBlocks ? wanted : kBlocks);
}

template <typename Piece>
bool fits(const TakeRowsArgs& args) {
  const auto bits = reinterpret_cast<std::uintptr_t>(args.values) | reinterpret_cast<std::uintptr_t>(args.out);
  return (bits | static_cast<std::uintptr_t>(args.row_bytes)) % sizeof(Piece) == 0;
}

template <typename Piece>
int launch_take(const TakeRowsArgs& args, void* stream) {
  const std::int64_t pieces = args.count * (args.row_bytes / static_cast<std::int64_t>(sizeof(Piece)));
  take_rows<Piece><<<blocks_for(pieces), kThreads, 0, static_cast<Stream>(stream)>>>(args);
  return launch_status();
}

}  // namespace
}  // namespace fastgrpo

FASTGRPO_EXPORT int fastgrpo_left_pack(const fastgrpo::LeftPackArgs* args, void* stream) {
  using namespace fastgrpo;
  if (args->rows == 0) return 0;
  const auto kernel = args->mask_bytes == 1   ? left_pack<std::uint8_t>
                      : args->mask_bytes == 4 ? left_pack<std::uint32_t>
                                              : left_pack<std::uint64_t>;
  kernel<<<args->rows, kThreads, 0, static_cast<Stream>(stream)>>>(*args);
  return launch_status();
}

FASTGRPO_EXPORT int fastgrpo_take_rows(const fastgrpo::TakeRowsArgs* args, void* stream) {
  using namespace fastgrpo;
  if (args->count == 0 || args->row_bytes == 0) return 0;
  if (fits<Bytes16>(*args)) return launch_take<Bytes16>(*args, stream);
  if (fits<std::uint64_t>(*args)) return launch_take<std::uint64_t>(*args, stream);
  if (fits<std::uint32_t>(*args)) return launch_take<std::uint32_t>(*args, stream);
  if (fits<std::uint16_t>(*args)) return launch_take<std::uint16_t>(*args, stream);
  return launch_take<std::uint8_t>(*args, stream);
}

FASTGRPO_EXPORT int fastgrpo_sum_rows(const fastgrpo::SumRowsArgs* args, void* stream) {
  using namespace fastgrpo;
  if (args->rows == 0 || args->width == 0) return 0;
  const auto kernel = args->dtype == RowDtype::float32    ? sum_rows<float>
                      : args->dtype == RowDtype::bfloat16 ? sum_rows<Grad16<GradDtype::bfloat16>::Type>
                                                          : sum_rows<Grad16<GradDtype::float16>::Type>;
  kernel<<<blocks_for(args->rows * args->width), kThreads, 0, static_cast<Stream>(stream)>>>(*args);
  return launch_status();
}
