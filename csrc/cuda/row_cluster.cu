// A cluster of thread blocks holds a whole row of logits in its registers: one read of device memory.
//
//   fetch    a block owns one of the cluster's C contiguous slices of every row. A bulk copy brings the slice of the next
//            row into shared memory while the block works on this one; clusters are persistent and take every n-th row
//   load     shared memory -> registers, kVectors 16-byte vectors a thread; from here on the next fetch may overwrite it
//   reduce   thread -> warp -> block -> every block of the cluster: each stores its partial into the shared memory of all
//            and waits for theirs on a barrier of its own. (A barrier of the cluster would order global memory too, and wait
//            for the gradients of the row before.) Each block then finishes the row by itself. None is gone while another
//            stores into it: what it waits for last are those stores. tests/csrc/test_cluster_exchange.py tries every order
//   store    16-bit gradients from the same registers. A block's partial says that its slice is loaded, so gradients may lie
//            over the row: d logprob over its first half, d entropy over its second
// Bytes: 4 + 2 a logit, 4 + 4 with both gradients. Registers: 4 kVectors of logits of 64 (two blocks a multiprocessor);
// the vectors beyond held_vectors wait in shared memory while the row is finished, which needs registers too. Shared memory:
// 8 KiB a vector (at most 80) for the slice on its way, and as much for each that waits. Serves rows up to
// 16 x kThreads x 4 kMaxVectors = 327,680 logits.
#include <atomic>
#include <type_traits>

#include "../export.h"
#include "row.h"

namespace fastgrpo {
namespace {

constexpr int kThreads = 512;
constexpr int kMaxVectors = 10;
// Vectors of a thread that stay in registers while the row is finished; the others wait in shared memory, as far as that lasts.
__host__ __device__ constexpr int held_vectors(int vectors) { return vectors <= 8 ? (vectors < 4 ? vectors : 4) : 6; }
constexpr int kMaxCluster = 16;

// Vectors of a row in the slice of a block: whole lines of 128 bytes, of logits and of gradients.
__host__ __device__ constexpr int slice_of(int columns, int cluster) {
  return ((columns + 3) / 4 + 16 * cluster - 1) / (16 * cluster) * 16;
}
static_assert(kThreads % 16 == 0, "a slice, rounded up, still fits kVectors vectors a thread");

template <int kVectors, GradDtype kDtype, bool kSecond>
__global__ void __launch_bounds__(kThreads, 2) row_cluster(const __grid_constant__ RowArgs args) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kHeld = held_vectors(kVectors);
  extern __shared__ float4 fetched[];
  __shared__ float4 waiting[kVectors > kHeld ? (kVectors - kHeld) * kThreads : 1];
  __shared__ Slot slots[kThreads / kLanes];
  // Of every block; two, because a slow block may still read a row's when a fast one sends the next row's.
  __shared__ float4 partials[2][kMaxCluster];
  __shared__ unsigned long long exchanged[2];
  __shared__ unsigned long long arrived;
  __shared__ RowScalars shared;

  const unsigned rank = ptx::cluster_ctarank(), count = ptx::cluster_nctarank();
  const int vectors = (args.columns + 3) / 4, slice = slice_of(args.columns, count);
  const int begin = rank * slice, own = max(0, min(slice, vectors - begin));
  const int step = gridDim.x / count;
  const auto fetch = [&](long long row) {
    ptx::mbarrier_arrive_expect_tx(&arrived, own * sizeof(float4));
    if (own > 0) {
      ptx::cp_async_bulk(fetched, args.logits + row * args.logits_pitch + 4 * begin, own * sizeof(float4), &arrived);
    }
  };

  int index = blockIdx.x / count;
  if (threadIdx.x == kLanes) {
    ptx::mbarrier_init(&arrived, 1);
    ptx::mbarrier_init(&exchanged[0], 1);
    ptx::mbarrier_init(&exchanged[1], 1);
    ptx::fence_proxy_async();
    fetch(index);
  }
  int target = target_of(args, index);
  // All blocks run, and their barriers are ready.
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();

  unsigned parity = 0, exchange = 0;
  for (; index < args.rows; index += step) {
    const int next = index + step;
    const bool more = next < args.rows;
    const Row row = make_row(args, index, target);
    target = more ? target_of(args, next) : -1;
    const bool skip = row.target < 0;
    const float z_target = threadIdx.x < kLanes && !skip ? target_logit(row) : 0.f;
    ptx::mbarrier_wait(&arrived, parity);
    parity ^= 1;
    if (skip) {
      __syncthreads();
      if (more && threadIdx.x == kLanes) fetch(next);
      write_ignored_row<kDtype>(args, index, rank * kThreads + threadIdx.x, count * kThreads);
      continue;
    }

    float4 z[kVectors];
    float max = kNoLogit, sum = 0.f, weighted2 = 0.f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int place = k * kThreads + threadIdx.x;
      z[k] = no_logits();
      if (place < own) {
        z[k] = fetched[place];
        to_logits(row, begin + place, z[k]);
      }
      max = fmaxf(max, max4(z[k]));
    }
    // Where there is no logit, anything but kNoLogit itself makes their exp 0.
    const float own_shift2 = max > kNoLogit ? max * kLog2e : 0.f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      add4(z[k], own_shift2, sum, weighted2);
      if (k >= kHeld) waiting[(k - kHeld) * kThreads + threadIdx.x] = z[k];
    }

    const Partial block = combine_block<kThreads>(make_partial(max, sum, weighted2), slots);  // its barrier: the slice is in registers
    if (more && threadIdx.x == kLanes) fetch(next);
    if (threadIdx.x < kLanes) {
      Partial all;
      if (count == 1) {
        if (threadIdx.x == 0) all = block;
      } else {
        const unsigned buffer = exchange % 2;
        if (threadIdx.x == 0) ptx::mbarrier_arrive_expect_tx(&exchanged[buffer], count * sizeof(float4));
        if (threadIdx.x < count) {
          // The target's logit goes along so that its load, too, is over before any block writes over the row.
          const float4 mail{block.max, block.sum, block.weighted, z_target};
          ptx::st_async(&partials[buffer][rank], mail, &exchanged[buffer], threadIdx.x);
        }
        ptx::mbarrier_wait(&exchanged[buffer], exchange / 2 % 2);
        if (threadIdx.x < count) {
          const float4 mail = partials[buffer][threadIdx.x];
          all = {mail.x, mail.y, mail.z};
        }
      }
      RowScalars scalars =
          finish_row<kDtype>(args, index, combine_lanes(all), z_target, rank == 0 && threadIdx.x == 0);
      apply_scale(args, z_target, scalars);
      if (threadIdx.x == 0) shared = scalars;
    }
    ++exchange;
    __syncthreads();

    const RowScalars scalars = shared;
    auto* grads = grad_row<kDtype>(args.grad, args.grad_pitch, index);
    auto* second = kSecond ? grad_row<kDtype>(args.second_grad, args.second_pitch, index) : nullptr;
    const auto store = [&](auto softcap) {
      constexpr bool kSoftcap = decltype(softcap)::value;
      const float inverse_outer = kSoftcap ? args.temperature / args.softcap : 0.f;
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int place = k * kThreads + threadIdx.x;
        if (place >= own) break;
        const float4 logits = k < kHeld ? z[k] : waiting[(k - kHeld) * kThreads + threadIdx.x];
        store4<kDtype, kSoftcap>(grads, begin + place, logits, scalars.shift2, scalars.first, inverse_outer);
        if (kSecond) store4<kDtype, kSoftcap>(second, begin + place, logits, scalars.shift2, scalars.second, inverse_outer);
      }
    };
    if (row.softcap) {
      store(std::true_type{});
    } else {
      store(std::false_type{});
    }
    // By the thread that stored the target's vector, behind that store.
    const int place = row.target_vector - begin;
    if (place >= 0 && place < own && place % kThreads == static_cast<int>(threadIdx.x)) {
      grads[row.target] = Grad16<kDtype>::round(scalars.first.at_target);
      if (kSecond) second[row.target] = Grad16<kDtype>::round(scalars.second.at_target);
    }
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

// How a plan runs on a device.
struct Launch {
  Kernel kernel;
  cudaLaunchAttribute attribute;
  cudaLaunchConfig_t config;

  Launch(const Plan& plan, const RowArgs& args, int clusters, cudaStream_t stream)
      : kernel(kernel_of(plan.vectors, args.grad_dtype, args.second_grad != nullptr)), attribute(), config() {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
    config.gridDim = clusters * plan.cluster;
    config.blockDim = kThreads;
    config.dynamicSmemBytes = slice_of(args.columns, plan.cluster) * sizeof(float4);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }

  // More shared memory, and more than 8 blocks in a cluster, than every card has.
  cudaError_t allow() const {
    constexpr int kMost = kMaxVectors * kThreads * sizeof(float4);
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMost)) {
      return error;
    }
    if (attribute.val.clusterDim.x <= 8) return cudaSuccess;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
};

// Clusters that run at once on a device; 0 where it cannot run any, -1 where it has no memory to tell: a kernel's code is loaded
// when it is first asked for.
int resident_clusters(const Plan& plan, const RowArgs& args, int device) {
  int major = 0, before = 0, clusters = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) || major < 9) return 0;
  if (cudaGetDevice(&before)) return 0;
  const Launch launch(plan, args, 1, nullptr);
  cudaError_t error = before == device ? cudaSuccess : cudaSetDevice(device);
  if (!error) error = launch.allow();
  if (!error) error = cudaOccupancyMaxActiveClusters(&clusters, launch.kernel, &launch.config);
  if (before != device) cudaSetDevice(before);
  cudaGetLastError();  // a card without this kernel is an answer, not an error of the next launch
  if (error == cudaErrorMemoryAllocation) return -1;
  return error ? 0 : clusters;
}

// The same, asked once for each kernel, but for -1, which is asked again.
int known_clusters(const Plan& plan, const RowArgs& args, int device) {
  constexpr int kDevices = 64, kPlans = kMaxCluster * (kMaxVectors + 1);
  static std::atomic<int> known[kDevices][2][2][kPlans];  // 0: not known yet, else 1 + clusters
  if (plan.cluster == 0 || device < 0 || device >= kDevices) return 0;
  std::atomic<int>& answer = known[device][args.grad_dtype == GradDtype::float16][args.second_grad != nullptr]
                                  [(plan.cluster - 1) * (kMaxVectors + 1) + plan.vectors];
  if (answer == 0) answer = 1 + resident_clusters(plan, args, device);
  return answer - 1;
}

}  // namespace
}  // namespace fastgrpo

FASTGRPO_EXPORT int fastgrpo_row_cluster(const fastgrpo::RowArgs* args, void* stream) {
  using namespace fastgrpo;
  if (args->rows == 0) return 0;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  const Plan plan = plan_of(args->columns);
  const int resident = known_clusters(plan, *args, device);
  if (resident == 0) return cudaErrorNotSupported;
  if (resident < 0) return cudaErrorMemoryAllocation;
  const Launch launch(plan, *args, args->rows < resident ? args->rows : resident, static_cast<cudaStream_t>(stream));
  if (const cudaError_t error = launch.allow()) return error;
  if (const cudaError_t error = cudaLaunchKernelEx(&launch.config, launch.kernel, *args)) return error;
  return launch_status();
}

FASTGRPO_EXPORT int fastgrpo_row_cluster_serves(int columns, int device) {
  using namespace fastgrpo;
  RowArgs args{};
  args.columns = columns;
  const int clusters = known_clusters(plan_of(columns), args, device);
  return clusters < 0 ? -1 : clusters > 0;
}
