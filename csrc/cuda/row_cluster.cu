// A cluster of thread blocks holds a whole row of logits in its registers: one read of device memory.
//
//   load     thread i of the cluster's C x kThreads loads vectors i, i + C kThreads, ...: kVectors 16-byte loads, all
//            under way at once
//   reduce   thread -> warp -> block -> every block of the cluster, which exchange their partials through distributed
//            shared memory; each block then finishes the row by itself
//   store    16-bit gradients from the same registers. The barrier of the exchange comes after every load of the row,
//            so they may lie over it: d logprob over its first half, d entropy over its second
// Bytes: 4 + 2 a logit, 4 + 4 with both gradients. Registers: 4 kVectors of logits of 64 (two blocks a multiprocessor);
// vectors beyond the sixth wait in shared memory (at most 32 KiB) while the row is finished, which needs registers too. Serves rows up to 16 x kThreads x 4 kMaxVectors = 327,680 logits.
#include <atomic>

#include "../export.h"
#include "row.h"

namespace fastgrpo {
namespace {

constexpr int kThreads = 512;
constexpr int kMaxVectors = 10;
constexpr int kHeldVectors = 6;
constexpr int kMaxCluster = 16;

template <int kVectors, GradDtype kDtype, bool kSecond>
__global__ void __launch_bounds__(kThreads, 2) row_cluster(const __grid_constant__ RowArgs args) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ Partial slots[kThreads / kLanes];
  __shared__ Partial blocks[kMaxCluster];
  __shared__ RowScalars shared;
  constexpr int kHeld = kVectors < kHeldVectors ? kVectors : kHeldVectors;
  __shared__ float4 waiting[kVectors > kHeld ? (kVectors - kHeld) * kThreads : 1];
  const unsigned rank = ptx::cluster_ctarank(), count = ptx::cluster_nctarank();
  const int thread = rank * kThreads + threadIdx.x, threads = count * kThreads;
  const long long index = blockIdx.x / count;
  const long long target = target_of(args, index);
  if (ignored(args, target)) return write_ignored_row<kDtype>(args, index, thread, threads);
  ptx::barrier_cluster_arrive();  // this block runs: others may write to its shared memory

  const Row row = make_row(args, index, static_cast<int>(target));
  const int vectors = row.vectors();
  float4 z[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int vector = thread + k * threads;
    const float nothing = -kInfinity<float>;
    z[k] = vector < vectors ? load(row, vector) : float4{nothing, nothing, nothing, nothing};
  }
  const float z_target = threadIdx.x < kLanes ? target_logit(row) : 0.f;
  Partial mine;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int vector = thread + k * threads;
    if (vector < vectors) to_logits(row, vector, z[k]);
    mine.max = fmaxf(mine.max, max4(z[k]));
  }
  const float own_shift = finite_shift(mine.max);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    add4(z[k], own_shift, mine.sum, mine.weighted);
    if (k >= kHeld) waiting[(k - kHeld) * kThreads + threadIdx.x] = z[k];
  }

  const Partial block = combine_block<kThreads>(mine, slots);
  ptx::barrier_cluster_wait();
  if (threadIdx.x < count) {
    ptx::st_shared_cluster(&blocks[rank].max, threadIdx.x, block.max);
    ptx::st_shared_cluster(&blocks[rank].sum, threadIdx.x, block.sum);
    ptx::st_shared_cluster(&blocks[rank].weighted, threadIdx.x, block.weighted);
  }
  __syncwarp();  // the barrier is for whole warps
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  if (threadIdx.x < kLanes) {
    Partial all;
    if (threadIdx.x < count) all = blocks[threadIdx.x];
    RowScalars scalars = finish_row(args, index, combine_lanes(all), z_target, thread == 0);
    apply_scale(args, z_target, scalars);
    if (threadIdx.x == 0) shared = scalars;
  }
  __syncthreads();

  const RowScalars scalars = shared;
  const float inverse_outer = row.softcap ? args.temperature / args.softcap : 0.f;
  auto* grads = grad_row<kDtype>(args.grad, args.grad_pitch, index);
  auto* second = kSecond ? grad_row<kDtype>(args.second_grad, args.second_pitch, index) : nullptr;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int vector = thread + k * threads;
    if (vector >= vectors) break;
    const float4 logits = k < kHeld ? z[k] : waiting[(k - kHeld) * kThreads + threadIdx.x];
    store4<kDtype>(grads, vector, logits, scalars.shift, scalars.first, inverse_outer);
    if (kSecond) store4<kDtype>(second, vector, logits, scalars.shift, scalars.second, inverse_outer);
  }
  // By the thread that stored the target's vector, behind that store.
  if (thread == row.target / 4 % threads) {
    grads[row.target] = Grad16<kDtype>::round(scalars.first.at_target);
    if (kSecond) second[row.target] = Grad16<kDtype>::round(scalars.second.at_target);
  }
#endif
}

using Kernel = void (*)(RowArgs);

template <GradDtype kDtype, bool kSecond>
Kernel kernel_of(int vectors) {
  switch ((vectors + 1) / 2) {
    case 1: return row_cluster<2, kDtype, kSecond>;
    case 2: return row_cluster<4, kDtype, kSecond>;
    case 3: return row_cluster<6, kDtype, kSecond>;
    case 4: return row_cluster<8, kDtype, kSecond>;
    default: return row_cluster<10, kDtype, kSecond>;
  }
}

Kernel kernel_of(int vectors, GradDtype dtype, bool second) {
  if (dtype == GradDtype::bfloat16) {
    return second ? kernel_of<GradDtype::bfloat16, true>(vectors) : kernel_of<GradDtype::bfloat16, false>(vectors);
  }
  return second ? kernel_of<GradDtype::float16, true>(vectors) : kernel_of<GradDtype::float16, false>(vectors);
}

// The smallest cluster whose registers hold a row, and 16-byte loads a thread; a cluster of 0 where none does.
struct Plan {
  int cluster, vectors;
};

Plan plan_of(int columns) {
  for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
    const int per_round = cluster * kThreads * 4;
    const int vectors = (columns + per_round - 1) / per_round;
    if (vectors <= kMaxVectors) return {cluster, vectors};
  }
  return {0, 0};
}

cudaLaunchConfig_t config_of(const Plan& plan, unsigned rows, cudaLaunchAttribute* attribute, cudaStream_t stream) {
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = rows * plan.cluster;
  config.blockDim = kThreads;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = 1;
  return config;
}

// More than 8 blocks in a cluster is what a card may allow and not what every card has.
cudaError_t allow_cluster(Kernel kernel, const Plan& plan) {
  if (plan.cluster <= 8) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

}  // namespace
}  // namespace fastgrpo

FASTGRPO_EXPORT int fastgrpo_row_cluster(const fastgrpo::RowArgs* args, void* stream) {
  using namespace fastgrpo;
  if (args->rows == 0) return 0;
  const Plan plan = plan_of(args->columns);
  if (plan.cluster == 0) return cudaErrorInvalidValue;
  const Kernel kernel = kernel_of(plan.vectors, args->grad_dtype, args->second_grad != nullptr);
  if (const cudaError_t error = allow_cluster(kernel, plan)) return error;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = config_of(plan, args->rows, &attribute, static_cast<cudaStream_t>(stream));
  if (const cudaError_t error = cudaLaunchKernelEx(&config, kernel, *args)) return error;
  return launch_status();
}

namespace fastgrpo {
namespace {

bool runs(const Plan& plan, int device) {
  int major = 0, before = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) || major < 9) return false;
  if (cudaGetDevice(&before) || cudaSetDevice(device)) return false;
  const Kernel kernel = kernel_of(plan.vectors, GradDtype::bfloat16, false);
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = config_of(plan, 1, &attribute, nullptr);
  int clusters = 0;
  cudaFuncAttributes attributes;
  const bool serves = !cudaFuncGetAttributes(&attributes, kernel) && !allow_cluster(kernel, plan) &&
                      !cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) && clusters > 0;
  cudaSetDevice(before);
  cudaGetLastError();  // a card without this kernel is an answer, not an error of the next launch
  return serves;
}

}  // namespace
}  // namespace fastgrpo

FASTGRPO_EXPORT int fastgrpo_row_cluster_serves(int columns, int device) {
  using namespace fastgrpo;
  constexpr int kDevices = 64, kPlans = kMaxCluster * (kMaxVectors + 1);
  static std::atomic<int> known[kDevices][kPlans];  // 0: not asked yet, 1: no, 2: yes
  const Plan plan = plan_of(columns);
  if (plan.cluster == 0 || device < 0 || device >= kDevices) return 0;
  std::atomic<int>& answer = known[device][(plan.cluster - 1) * (kMaxVectors + 1) + plan.vectors];
  if (answer == 0) answer = 1 + runs(plan, device);
  return answer - 1;
}
