// One-line wrappers of instructions, named as PTX names them, with what HIP has in their place.
#pragma once

#include <cstdint>

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

// The larger, or NaN where one of them is.
__device__ __forceinline__ float max_nan(float x, float y) {
#if !defined(__HIPCC__) && __CUDA_ARCH__ >= 800
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
#else
  return x < y ? y : x;  // a NaN x stays
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
template <typename T>
__device__ __forceinline__ T shfl_xor(T value, int mask) {
#if defined(__HIPCC__)
  return __shfl_xor(value, mask, 32);
#else
  return __shfl_xor_sync(0xffffffffu, value, mask);
#endif
}

// From the lane that many below, within groups of 32; a lane without one keeps its own.
template <typename T>
__device__ __forceinline__ T shfl_up(T value, int delta) {
#if defined(__HIPCC__)
  return __shfl_up(value, delta, 32);
#else
  return __shfl_up_sync(0xffffffffu, value, delta);
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

__device__ __forceinline__ unsigned shared_address(const void* address) {
  return static_cast<unsigned>(__cvta_generic_to_shared(address));
}

// Barriers in shared memory that count the bytes of asynchronous copies and stores, and those.

__device__ __forceinline__ void mbarrier_init(unsigned long long* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned long long* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.relaxed.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait_parity(unsigned long long* barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Stores to the place of `address`, in the shared memory of the CTA of that rank, and counts the 16 bytes on that CTA's
// `barrier`: who waits for it sees the value, without a fence on either side.
__device__ __forceinline__ void st_async(float4* address, const float4& value, unsigned long long* barrier, unsigned rank) {
  unsigned remote, remote_barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(address)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(remote_barrier)
               : "memory");
}

__device__ __forceinline__ void mbarrier_wait(unsigned long long* barrier, unsigned parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

__device__ __forceinline__ void cp_async_bulk(void* shared, const void* global, unsigned bytes, unsigned long long* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

#endif

}  // namespace fastgrpo::ptx
