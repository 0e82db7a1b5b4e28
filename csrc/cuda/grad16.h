// The two 16-bit float types under one name, for CUDA and HIP.
#pragma once

#if !defined(__HIPCC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include "device.h"
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
  static __device__ float4 widen4(const uint2& bits) {
    const T four[4] = {__builtin_bit_cast(T, static_cast<unsigned short>(bits.x)),
                       __builtin_bit_cast(T, static_cast<unsigned short>(bits.x >> 16)),
                       __builtin_bit_cast(T, static_cast<unsigned short>(bits.y)),
                       __builtin_bit_cast(T, static_cast<unsigned short>(bits.y >> 16))};
    return {widen(four[0]), widen(four[1]), widen(four[2]), widen(four[3])};
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
  static __device__ float4 widen4(const uint2& bits) {
    const float2 low = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(bits.x));
    const float2 high = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(bits.y));
    return {low.x, low.y, high.x, high.y};
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
  static __device__ float4 widen4(const uint2& bits) {
    const float2 low = __half22float2(reinterpret_cast<const __half2&>(bits.x));
    const float2 high = __half22float2(reinterpret_cast<const __half2&>(bits.y));
    return {low.x, low.y, high.x, high.y};
  }
};

#endif

}  // namespace fastgrpo
