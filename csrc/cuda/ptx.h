// One-line wrappers of instructions, named as PTX names them, with what HIP has in their place.
#pragma once

#include "device.h"

namespace fastgrpo::ptx {

// 2^x to 2 units in the last place; a result below 2^-126 is 0.
__device__ __forceinline__ float ex2(float x) {
#if defined(__HIPCC__)
  return __builtin_amdgcn_exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// 16 bytes that are read once: they leave the caches first.
__device__ __forceinline__ float4 ld_streaming(const float4* address) {
#if defined(__HIPCC__)
  return *address;
#else
  return __ldcs(address);
#endif
}

// Butterfly within groups of 32 lanes, on warps of 32 and of 64.
__device__ __forceinline__ float shfl_xor(float value, int mask) {
#if defined(__HIPCC__)
  return __shfl_xor(value, mask, 32);
#else
  return __shfl_xor_sync(0xffffffffu, value, mask);
#endif
}

#if !defined(__HIPCC__)

// Thread block clusters, compute capability 9.0 and newer.

__device__ __forceinline__ unsigned cluster_ctarank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ unsigned cluster_nctarank() {
  unsigned count;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  return count;
}

__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores to the place of `address`, a shared-memory address of this CTA, in the CTA of that rank.
__device__ __forceinline__ void st_shared_cluster(float* address, unsigned rank, float value) {
  const unsigned local = static_cast<unsigned>(__cvta_generic_to_shared(address));
  unsigned remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
}

#endif

}  // namespace fastgrpo::ptx
