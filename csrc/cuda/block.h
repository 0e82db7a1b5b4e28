// Sums and scans over a block, in a fixed order, on warps of 32 and of 64: threads form groups of 32 lanes.
#pragma once

#include "ptx.h"

namespace fastgrpo {

constexpr int kGroup = 32;

// The sum over a group, the same bits in every lane.
template <typename T>
__device__ __forceinline__ T sum_group(T value) {
#pragma unroll
  for (int mask = kGroup / 2; mask > 0; mask /= 2) value += ptx::shfl_xor(value, mask);
  return value;
}

// The sum over a block, in every thread. `slots`: one a group, in shared memory; free again on return.
template <int kThreads, typename T>
__device__ __forceinline__ T sum_block(T value, T* slots) {
  static_assert(kThreads % kGroup == 0 && kThreads / kGroup <= kGroup, "one slot a lane of a group");
  const int group = threadIdx.x / kGroup, lane = threadIdx.x % kGroup;
  value = sum_group(value);
  if (lane == 0) slots[group] = value;
  __syncthreads();
  const T all = sum_group(lane < kThreads / kGroup ? slots[lane] : T(0));
  __syncthreads();
  return all;
}

// The sum over the threads before this one; `total`: over all of them.
template <int kThreads>
__device__ __forceinline__ int exclusive_scan_block(int value, int* slots, int& total) {
  static_assert(kThreads % kGroup == 0 && kThreads / kGroup <= kGroup, "one slot a lane of a group");
  const int group = threadIdx.x / kGroup, lane = threadIdx.x % kGroup;
  int through = value;
#pragma unroll
  for (int delta = 1; delta < kGroup; delta *= 2) {
    const int before = ptx::shfl_up(through, delta);
    if (lane >= delta) through += before;
  }
  if (lane == kGroup - 1) slots[group] = through;
  __syncthreads();
  const int other = lane < kThreads / kGroup ? slots[lane] : 0;
  const int groups_before = sum_group(lane < group ? other : 0);
  total = sum_group(other);
  __syncthreads();
  return groups_before + through - value;
}

// An id of 32 or 64 bits.
struct Ids {
  const void* data;
  bool are_64_bit;

  __device__ __forceinline__ std::int64_t operator[](std::int64_t i) const {
    return are_64_bit ? static_cast<const std::int64_t*>(data)[i] : static_cast<const std::int32_t*>(data)[i];
  }
};

}  // namespace fastgrpo
