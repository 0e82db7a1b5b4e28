// A barrier that no block shares with another, in clusters of a size and a number of blocks: what synccheck says of it is not
// about the exchange between the blocks of csrc/cuda/row_cluster.cu, which this has none of.
//
//   nvcc -std=c++17 -arch=sm_90a -I csrc/cuda -o probe tests/gpu/synccheck_probe.cu
//   compute-sanitizer --tool synccheck ./probe CLUSTER BLOCKS
//
// Without the tool it prints how many sums are wrong: 0. bench/NOTES.md has what the tool says.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "ptx.h"

using namespace fastgrpo;

constexpr int kFloats = 512, kRounds = 3;

__global__ void copy_and_sum(const float* from, float* sums) {
  __shared__ alignas(16) float values[kFloats];
  __shared__ unsigned long long barrier;
  __shared__ float total;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&barrier, 1);
    ptx::fence_proxy_async();
    total = 0;
  }
  __syncthreads();
  for (int round = 0; round < kRounds; ++round) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(&barrier, sizeof values);
      ptx::cp_async_bulk(values, from + (blockIdx.x * kRounds + round) * kFloats, sizeof values, &barrier);
    }
    while (!ptx::mbarrier_try_wait_parity(&barrier, round & 1)) {
    }
    atomicAdd(&total, values[threadIdx.x]);
    __syncthreads();
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

int main(int count, char** arguments) {
  if (count != 3) return std::fprintf(stderr, "give the blocks of a cluster, and of the grid\n"), 2;
  const unsigned size = std::atoi(arguments[1]), blocks = std::atoi(arguments[2]);
  std::vector<float> host(blocks * kRounds * kFloats, 1.0f), found(blocks);
  float *from, *sums;
  cudaMalloc(&from, host.size() * sizeof(float));
  cudaMalloc(&sums, blocks * sizeof(float));
  cudaMemcpy(from, host.data(), host.size() * sizeof(float), cudaMemcpyHostToDevice);
  cudaFuncSetAttribute(copy_and_sum, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {size, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = kFloats;
  config.attrs = &cluster;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, copy_and_sum, static_cast<const float*>(from), sums);
  cudaMemcpy(found.data(), sums, blocks * sizeof(float), cudaMemcpyDeviceToHost);
  int wrong = 0;
  for (const float sum : found) wrong += sum != kRounds * kFloats;
  std::printf("clusters of %u, %u blocks: %d sums wrong, %s\n", size, blocks, wrong, cudaGetErrorString(cudaGetLastError()));
  return wrong != 0;
}
