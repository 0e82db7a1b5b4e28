// As much of HIP's runtime as cuda/row.h needs, for a plain C++ compiler: one thread, whose shuffles find itself.
#pragma once

#include <cmath>
#include <cstdint>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __builtin_amdgcn_exp2f exp2f

struct float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct Thread {
  unsigned x;
};
constexpr Thread threadIdx{0};
inline void __syncthreads() {}

template <typename T>
T __shfl_xor(T value, int, int) {
  return value;
}
template <typename T>
T __shfl_up(T value, int, int) {
  return value;
}

using hipStream_t = void*;
inline int hipGetLastError() { return 0; }

// GCC has the type from version 13 on.
struct BFloat16 {
  unsigned short bits;

  BFloat16() = default;
  explicit BFloat16(float value) {
    const unsigned wide = __builtin_bit_cast(unsigned, value);
    bits = static_cast<unsigned short>(value != value ? 0x7fc0u : (wide + 0x7fffu + (wide >> 16 & 1u)) >> 16);
  }
  explicit operator float() const { return __builtin_bit_cast(float, static_cast<unsigned>(bits) << 16); }
};
#define __bf16 BFloat16
