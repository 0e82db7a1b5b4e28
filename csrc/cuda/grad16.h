// The two 16-bit float types under one name, for CUDA and HIP.
#pragma once

#if !defined(__HIPCC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include "row_args.h"

namespace fastgrpo {

template <GradDtype kDtype>
struct Grad16;

#if defined(__HIPCC__)

// The compiler's own 16-bit types.
template <typename T>
struct Rounding {
  using Type = T;
  static __device__ Type round(float x) { return static_cast<T>(x); }
  static __device__ float widen(Type x) { return static_cast<float>(x); }
  static __device__ unsigned round2(float low, float high) {
    const T pair[2] = {round(low), round(high)};
    return __builtin_bit_cast(unsigned, pair);
  }
};

template <>
struct Grad16<GradDtype::bfloat16> : Rounding<__bf16> {};
template <>
struct Grad16<GradDtype::float16> : Rounding<_Float16> {};

#else

template <>
struct Grad16<GradDtype::bfloat16> {
  using Type = __nv_bfloat16;
  static __device__ Type round(float x) { return __float2bfloat16(x); }
  static __device__ float widen(Type x) { return __bfloat162float(x); }
  static __device__ unsigned round2(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const unsigned&>(pair);
  }
};

template <>
struct Grad16<GradDtype::float16> {
  using Type = __half;
  static __device__ Type round(float x) { return __float2half(x); }
  static __device__ float widen(Type x) { return __half2float(x); }
  static __device__ unsigned round2(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const unsigned&>(pair);
  }
};

#endif

}  // namespace fastgrpo
