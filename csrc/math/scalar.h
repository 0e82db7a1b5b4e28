// What the headers of this folder share. FASTGRPO_HD marks what runs on the host and on the device; it is nothing for a
// plain C++ compiler.
#pragma once

#include <limits>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define FASTGRPO_HD __host__ __device__
#else
#define FASTGRPO_HD
#endif

namespace fastgrpo {

// A variable, because device code may read a constant but not call numeric_limits.
template <typename T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

// torch.clamp: a NaN stays NaN, and where low > high the result is high.
template <typename T>
FASTGRPO_HD inline T clamp(T x, T low, T high) {
  const T raised = x < low ? low : x;
  return raised > high ? high : raised;
}

}  // namespace fastgrpo
