// 16-bit numbers by eight: 16 bytes of them as fp32, and back with one rounding each.
#pragma once

#include "row.h"

namespace fastgrpo {

struct Eight {
  float x[8];
};

template <GradDtype kDtype>
__device__ __forceinline__ Eight widen(const uint4& packed) {
  using Type = typename Grad16<kDtype>::Type;
  Eight wide;
  const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Type* pair = reinterpret_cast<const Type*>(&words[i]);
    wide.x[2 * i] = static_cast<float>(pair[0]);
    wide.x[2 * i + 1] = static_cast<float>(pair[1]);
  }
  return wide;
}

template <GradDtype kDtype>
__device__ __forceinline__ uint4 round8(const Eight& wide) {
  return {Grad16<kDtype>::round2(wide.x[0], wide.x[1]), Grad16<kDtype>::round2(wide.x[2], wide.x[3]),
          Grad16<kDtype>::round2(wide.x[4], wide.x[5]), Grad16<kDtype>::round2(wide.x[6], wide.x[7])};
}

}  // namespace fastgrpo
