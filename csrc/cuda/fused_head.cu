// The product of the head with the row's passes in its epilogue: logits exist in registers alone. Compute capability 9.0, bfloat16.
//
//   shifts    shift_r = the target's logit, a product of one row by one, to a whole number of bits: within 64 of the row's largest
//             for every target that a model would draw
//   product   a tile of 128 x 256 logits; then e = 2^(z log2 e - shift_r) of each, their sum and weighted sum over the tile's part of
//             the row (its strip), and E = e in 16 bit. The target stays out of sums and exponentials; its product is kept in fp32
//   finish    a row from its strips: statistics, the coefficient g of its log-prob, and what makes a gradient of E:
//                 g (1[j = t] - p_j) = factor E_j for j != t,   factor = -g / total,   total = sum + e_t
//                                    = g (1 - p_t) = g sum / total at the target, in fp32, where E is 0
//             A row whose largest logit is more than 64 bits from its shift takes that logit, rounded, for a shift, and all is done
//             once more: the second product and the second finish of a call end at once where no row was. No bit of a row
//             depends on its neighbours
//
// bfloat16 has fp32's exponents, so digits of E do not depend on the shift, and 64 bits leave room for sums and for what is 2^-60 of
// them. A factor is g p_t / e_t, at least 2^-64 g p_t: hidden states times it lose digits below 2^-126. With statistics given,
// `product` writes gradients themselves.
//
// The product: clusters of two blocks, one a multiprocessor, walk over tiles; each block has 128 rows, and both have the same
// strip of the vocabulary. One thread asks for boxes of 64 columns, [128, 64] of hidden and half of [256, 64] of weight, which goes to both
// blocks; two warp groups multiply 64 rows each, and one may be a few boxes ahead of the other and at its epilogue meanwhile. A
// stage of shared memory is free when all four warp groups that read it say so.
//
// Columns of a tile are permuted in groups of 32 as they are copied, so that a thread ends with eight neighbours, 16 bytes of E:
// a tensor of five dimensions, column 32 g + 8 q + 2 i + b at (b, q, i, g), is copied in the order g, i, q, b. Where the last group
// is not whole, its half of the strip is copied two columns at a time, and zeros for those behind the last, which then are no logits.
#include <atomic>

#include "../export.h"
#include "fused_head.h"
#include "row.h"
#include "wgmma.h"

namespace fastgrpo {
namespace {

constexpr int kTileRows = 128, kStrip = 256, kDepth = 64;
constexpr int kPermuted = 32;  // columns that are permuted among themselves: a group
constexpr int kCluster = 2;
constexpr int kHalfStrip = kStrip / kCluster;  // what a block copies, for both
constexpr int kStages = 4;
constexpr int kHiddenBytes = kTileRows * kDepth * 2, kWeightBytes = kStrip * kDepth * 2, kStageBytes = kHiddenBytes + kWeightBytes;
constexpr int kSwizzleBytes = 1024;  // what a stage must be aligned to
constexpr int kSharedBytes = kStages * kStageBytes + kSwizzleBytes;
constexpr int kWarpGroup = 128, kConsumers = 2, kThreads = (1 + kConsumers) * kWarpGroup;
// Pairs of tiles below each other that are walked over before the next strip: 2048 rows of hidden stay in the cache.
constexpr int kBand = 8;
// Bits that a row's largest logit may be from its shift, and from which on it is taken for infinite.
constexpr float kFar2 = 64.f, kFarthest2 = 1.0e12f;
// Makes every exponential of a row 0, whose products are finite.
constexpr float kNoShift2 = 1.0e30f;

// --- logits

// From products to z log2 e.
template <bool kSoftcap>
struct ToLogits {
  float inner, outer;

  __device__ explicit ToLogits(const RowArgs& args)
      : inner(kSoftcap ? args.logit_scale / args.softcap * 2.f * kLog2e : 0.f),
        outer((kSoftcap ? args.softcap : args.logit_scale) / args.temperature * kLog2e) {}

  // tanh of a softcap. Its error is absolute, 2^-22: a logit's is 2^-22 softcap / temperature.
  __device__ float tanh(float product) const { return 1.f - __fdividef(2.f, 1.f + ptx::ex2(inner * product)); }

  // z log2 e - shift, and the slope of a softcap.
  __device__ float difference(float product, float shift2, float& slope) const {
    if constexpr (!kSoftcap) return fmaf(product, outer, -shift2);
    const float relative = tanh(product);
    slope = product == kNoLogit ? 0.f : 1.f - relative * relative;
    return product == kNoLogit ? kNoLogit : fmaf(relative, outer, -shift2);
  }
};

// --- tiles

struct Tile {
  int row, strip;
};

struct Tiles {
  int pairs, strips;

  __device__ explicit Tiles(const RowArgs& args)
      : pairs((args.rows + kCluster * kTileRows - 1) / (kCluster * kTileRows)), strips((args.columns + kStrip - 1) / kStrip) {}

  __device__ int count() const { return pairs * strips; }

  __device__ Tile operator[](int index) const {
    const int band = index / (kBand * strips), place = index % (kBand * strips), height = min(kBand, pairs - band * kBand);
    return {((band * kBand + place % height) * kCluster + static_cast<int>(ptx::cluster_ctarank())) * kTileRows, place / height};
  }
};

// A place in the ring of stages, and which time around.
struct Stage {
  int index = 0;
  unsigned parity = 0;

  __device__ void advance() {
    if (++index == kStages) index = 0, parity ^= 1;
  }
};

struct Ring {
  unsigned char* stages;
  unsigned long long *full, *empty;

  __device__ unsigned char* hidden(const Stage& stage) const { return stages + stage.index * kStageBytes; }
  __device__ unsigned char* weight(const Stage& stage) const { return hidden(stage) + kHiddenBytes; }

  // Both blocks write into each other's stages: a stage is free when nobody reads it in either.
  __device__ void release(const Stage& stage) const {
    const unsigned thread = threadIdx.x % kWarpGroup;
    if (thread < kCluster) ptx::mbarrier_arrive_remote(&empty[stage.index], thread);
  }
};

// Weight in groups of columns and, for the half strip whose last group is not whole, in pairs; -1: there is none.
struct WeightMaps {
  const CUtensorMap &groups, &pairs;
  int ragged;

  __device__ WeightMaps(const CUtensorMap& groups, const CUtensorMap& pairs, int columns)
      : groups(groups), pairs(pairs), ragged(columns % kPermuted == 0 ? -1 : columns / kHalfStrip) {}

  // A box of `half`, into the same place of both blocks.
  __device__ void copy(unsigned char* shared, int box, int half, unsigned long long* full) const {
    constexpr unsigned short kBoth = (1 << kCluster) - 1;
    if (half != ragged) {
      ptx::cp_async_bulk_tensor_groups(shared, &groups, box * kDepth, half * (kHalfStrip / kPermuted), full, kBoth);
      return;
    }
#pragma unroll 1
    for (int pair = 0; pair < kHalfStrip / 2; ++pair) {
      const int group = pair / (kPermuted / 2), i = pair / 4 % 4, q = pair % 4;
      ptx::cp_async_bulk_tensor_2d(shared + pair * (2 * kDepth * 2), &pairs, box * kDepth,
                                   half * kHalfStrip + group * kPermuted + 8 * q + 2 * i, full, kBoth);
    }
  }
};

__device__ __forceinline__ void produce(const Ring& ring, const CUtensorMap& hidden, const WeightMaps& weight, const Tiles& tiles,
                                        int boxes) {
  const int rank = ptx::cluster_ctarank();
  Stage stage;
  for (int index = blockIdx.x / kCluster; index < tiles.count(); index += gridDim.x / kCluster) {
    const Tile tile = tiles[index];
    for (int box = 0; box < boxes; ++box) {
      ptx::mbarrier_wait(&ring.empty[stage.index], stage.parity ^ 1);
      unsigned long long* full = &ring.full[stage.index];
      ptx::mbarrier_arrive_expect_tx(full, kStageBytes);
      ptx::cp_async_bulk_tensor_2d(ring.hidden(stage), &hidden, box * kDepth, tile.row, full);
      weight.copy(ring.weight(stage) + rank * (kWeightBytes / kCluster), box, tile.strip * kCluster + rank, full);
      stage.advance();
    }
  }
}

// The products of a warp group's 64 rows with the strip.
__device__ __forceinline__ void multiply(const Ring& ring, Stage& stage, int consumer, int boxes, float (&products)[128]) {
  Stage before = stage;
  for (int box = 0; box < boxes; ++box) {
    ptx::mbarrier_wait(&ring.full[stage.index], stage.parity);
    const std::uint64_t hidden = ptx::wgmma_descriptor(ring.hidden(stage) + consumer * (kHiddenBytes / kConsumers));
    const std::uint64_t weight = ptx::wgmma_descriptor(ring.weight(stage));
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDepth / 16; ++i) ptx::wgmma_m64n256k16(products, hidden + 2 * i, weight + 2 * i, box + i > 0);
    ptx::wgmma_commit_group();
    if (box > 0) {
      ptx::wgmma_wait_group<1>();
      ring.release(before);
    }
    before = stage;
    stage.advance();
  }
  ptx::wgmma_wait_group<0>();
  ring.release(before);
}

// --- the epilogue

// One of a thread's two rows of a tile.
struct TileRow {
  int index;   // -1 behind the last
  int target;  // column of the strip, -1 where it is in another or another thread has it
  float shift2;
  Slope slope;  // FusedPass::gradients
};

template <FusedPass kPass>
__device__ __forceinline__ TileRow tile_row(const FusedHeadArgs& args, int index, int strip) {
  TileRow row{-1, -1, kNoShift2, {}};
  if (index >= args.row.rows) return row;
  row.index = index;
  const int target = target_of(args.row, index);
  if (target < 0) return row;
  const int column = target - strip * kStrip, quarter = threadIdx.x % 4;
  if (column >= 0 && column < kStrip && column / 8 % 4 == quarter) row.target = column;
  if constexpr (kPass == FusedPass::gradients) {
    const RowScalars scalars = given_scalars<GradDtype::bfloat16>(args.row, index, false);
    row.shift2 = scalars.shift2, row.slope = scalars.first;
  } else {
    row.shift2 = args.shifts2[index];
  }
  return row;
}

// Takes the target's product out of the second (kHalf = 1) or first of a thread's rows: from where the copy has put its column, see
// the top of this file; the thread is the one of the four whose `quarter` it is.
template <int kHalf>
__device__ __forceinline__ float take_target(int column, float (&products)[128]) {
  const int place = 4 * (column / kPermuted * 4 + column / 2 % 4) + column % 2;
  float product = 0.f;
#pragma unroll
  for (int j = 0; j < kStrip / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& candidate = products[4 * j + 2 * kHalf + i];
      if (place == 4 * j + i) product = candidate, candidate = kNoLogit;
    }
  }
  return product;
}

// Makes products of columns from `columns` of the strip on logits that are none.
__device__ __forceinline__ void leave_out(int columns, float (&products)[128]) {
  const int quarter = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kStrip / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (j / 4 * kPermuted + 8 * quarter + 2 * (j % 4) + i % 2 >= columns) products[4 * j + i] = kNoLogit;
    }
  }
}

// What a thread has of a row: 8 neighbours in each group of 32 columns, of which the strip has `groups`.
template <FusedPass kPass, bool kSoftcap, int kHalf>
__device__ __forceinline__ void finish_tile_row(const FusedHeadArgs& args, const ToLogits<kSoftcap>& to_logits, const TileRow& row,
                                                int strip, int groups, float (&products)[128]) {
  constexpr bool kGradients = kPass == FusedPass::gradients;
  const int quarter = threadIdx.x % 4;
  auto* out = static_cast<__nv_bfloat16*>(args.row.grad) + row.index * args.row.grad_pitch + strip * kStrip;
  float target_product = 0.f;
  if (row.target >= 0) {
    target_product = take_target<kHalf>(row.target, products);
    if (!kGradients) args.target_products[row.index] = target_product;
  }
  float top = -kNoShift2, sum[2] = {0.f, 0.f}, weighted[2] = {0.f, 0.f};
#pragma unroll
  for (int group = 0; group < kStrip / kPermuted; ++group) {
    if (group >= groups) break;
    unsigned packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float value[2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        float slope = 1.f;
        // A logit of -inf: its products with 0 must be 0.
        const float difference = ptx::max_nan(
            to_logits.difference(products[4 * (4 * group + i) + 2 * kHalf + b], row.shift2, slope), kNoLogit);
        const float e = ptx::ex2(difference);
        if constexpr (kGradients) {
          value[b] = e * fmaf(row.slope.b, difference, row.slope.a) * slope;
        } else {
          top = fmaxf(top, difference);
          sum[b] += e;
          weighted[b] = fmaf(e, difference, weighted[b]);
          value[b] = e * slope;
        }
      }
      packed[i] = Grad16<GradDtype::bfloat16>::round2(value[0], value[1]);
    }
    if (kPass != FusedPass::statistics && row.index >= 0) {
      reinterpret_cast<uint4*>(out)[(group * kPermuted) / 8 + quarter] = {packed[0], packed[1], packed[2], packed[3]};
    }
  }
  if constexpr (kGradients) {
    if (row.target < 0) return;
    float slope = 1.f;
    to_logits.difference(target_product, 0.f, slope);
    args.at_target[row.index] = row.slope.at_target * slope;
  } else {
    float4 partial{top, sum[0] + sum[1], weighted[0] + weighted[1], 0.f};
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
      partial.x = fmaxf(partial.x, ptx::shfl_xor(partial.x, mask));
      partial.y += ptx::shfl_xor(partial.y, mask);
      partial.z += ptx::shfl_xor(partial.z, mask);
    }
    if (quarter == 0 && row.index >= 0) args.partials[static_cast<long long>(strip) * args.row.rows + row.index] = partial;
  }
}

// --- the kernels

// `again`: only where a row asked for it.
template <FusedPass kPass, bool kSoftcap>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    product(const __grid_constant__ CUtensorMap hidden, const __grid_constant__ CUtensorMap groups,
            const __grid_constant__ CUtensorMap pairs, const __grid_constant__ FusedHeadArgs args, bool again) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if (again && *args.repeat == 0) return;
  extern __shared__ unsigned char shared[];
  __shared__ unsigned long long full[kStages], empty[kStages];
  const unsigned misplaced = ptx::shared_address(shared) % kSwizzleBytes;
  const Ring ring{shared + (misplaced == 0 ? 0 : kSwizzleBytes - misplaced), full, empty};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&full[i], 1);
      ptx::mbarrier_init(&empty[i], kCluster * kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();

  const Tiles tiles(args.row);
  const int boxes = (args.width + kDepth - 1) / kDepth;
  if (threadIdx.x < kWarpGroup) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == 0) produce(ring, hidden, WeightMaps(groups, pairs, args.row.columns), tiles, boxes);
    __syncwarp();
  } else {
    ptx::setmaxnreg_inc<232>();
    const int consumer = threadIdx.x / kWarpGroup - 1, thread = threadIdx.x % kWarpGroup;
    const int first_row = consumer * (kTileRows / kConsumers) + thread / kLanes * 16 + thread % kLanes / 4;
    const ToLogits<kSoftcap> to_logits(args.row);
    float products[128];
    Stage stage;
    for (int index = blockIdx.x / kCluster; index < tiles.count(); index += gridDim.x / kCluster) {
      const Tile tile = tiles[index];
      const TileRow first = tile_row<kPass>(args, tile.row + first_row, tile.strip);
      const TileRow second = tile_row<kPass>(args, tile.row + first_row + 8, tile.strip);
      multiply(ring, stage, consumer, boxes, products);
      const int columns = args.row.columns - tile.strip * kStrip, groups = (columns + kPermuted - 1) / kPermuted;
      if (columns < kStrip && columns % kPermuted != 0) leave_out(columns, products);
      finish_tile_row<kPass, kSoftcap, 0>(args, to_logits, first, tile.strip, groups, products);
      finish_tile_row<kPass, kSoftcap, 1>(args, to_logits, second, tile.strip, groups, products);
    }
  }
  // Until then the other block may write into this one's shared memory.
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
#elif defined(__CUDA_ARCH__)
#error "These instructions are those of sm_90a alone."
#endif
}

constexpr int kRowWarps = 8;

// A warp a row.
template <bool kSoftcap>
__global__ void __launch_bounds__(kRowWarps* kLanes) shifts(const __grid_constant__ FusedHeadArgs args) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.repeat = 0;
  const int row = blockIdx.x * kRowWarps + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  if (row >= args.row.rows) return;
  const int target = target_of(args.row, row);
  float product = 0.f;
  if (target >= 0) {
    const auto* hidden = static_cast<const uint2*>(args.hidden) + static_cast<long long>(row) * (args.width / 4);
    const auto* weight = static_cast<const uint2*>(args.weight) + static_cast<long long>(target) * (args.width / 4);
    for (int i = lane; i < args.width / 4; i += kLanes) {
      const float4 a = Grad16<GradDtype::bfloat16>::widen4(hidden[i]), b = Grad16<GradDtype::bfloat16>::widen4(weight[i]);
      product += a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w);
    }
  }
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) product += ptx::shfl_xor(product, mask);
  float slope;
  const float shift2 = rintf(ToLogits<kSoftcap>(args.row).difference(product, 0.f, slope));
  // A target that has no finite logit says nothing of the others.
  if (lane == 0) args.shifts2[row] = target < 0 ? kNoShift2 : fabsf(shift2) < kFarthest2 ? shift2 : 0.f;
}

constexpr int kFinishWarps = 16;

// A block has 32 rows, one a lane, and its warps share their strips. `again`: see `product`.
template <bool kSoftcap>
__global__ void __launch_bounds__(kFinishWarps* kLanes) finish(const __grid_constant__ FusedHeadArgs args, bool again) {
  if (again && *args.repeat == 0) return;
  __shared__ float tops[kFinishWarps][kLanes], sums[kFinishWarps][kLanes], weighteds[kFinishWarps][kLanes];
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes, row = blockIdx.x * kLanes + lane;
  const int strips = Tiles(args.row).strips;
  float top = -kNoShift2, sum = 0.f, weighted = 0.f;
  if (row < args.row.rows) {
#pragma unroll 4
    for (int strip = warp; strip < strips; strip += kFinishWarps) {
      const float4 partial = args.partials[static_cast<long long>(strip) * args.row.rows + row];
      top = fmaxf(top, partial.x), sum += partial.y, weighted += partial.z;
    }
  }
  tops[warp][lane] = top, sums[warp][lane] = sum, weighteds[warp][lane] = weighted;
  __syncthreads();
  if (warp > 0 || row >= args.row.rows) return;
  for (int other = 1; other < kFinishWarps; ++other) {
    top = fmaxf(top, tops[other][lane]), sum += sums[other][lane], weighted += weighteds[other][lane];
  }

  const RowArgs& args_row = args.row;
  const int target = target_of(args_row, row);
  if (target < 0) {
    args_row.logprobs[row] = args_row.lse[row] = 0.f;
    if (args_row.entropy != nullptr) args_row.entropy[row] = 0.f;
    if (args_row.grad != nullptr) args_row.row_factors[row] = args.at_target[row] = 0.f;
    return;
  }
  const float shift2 = args.shifts2[row];
  float slope = 1.f;
  const float of_target = ToLogits<kSoftcap>(args_row).difference(args.target_products[row], shift2, slope);
  top = fmaxf(top, of_target);
  if (!again && fabsf(top) > kFar2 && fabsf(top) < kFarthest2) {
    args.shifts2[row] = rintf(shift2 + top);
    *args.repeat = 1;
    return;
  }
  const Partial others{0.f, sum, weighted * kLog2};
  const SoftmaxResult<float> result = finalize(others, of_target * kLog2);
  args_row.logprobs[row] = result.logprob;
  args_row.lse[row] = fmaf(shift2, kLog2, result.lse);
  if (args_row.entropy != nullptr) args_row.entropy[row] = result.entropy;
  if (args_row.grad == nullptr) return;
  const float g = args_row.coefficients == Coefficients::objective ? objective_coefficient(args_row, row, result.logprob) : 1.f;
  const float by = g / (sum + ptx::ex2(of_target));
  args_row.row_factors[row] = -by;
  args.at_target[row] = by * sum * slope;
}

// --- launches

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Of the driver, which nothing here links; null where it is too old.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess ? reinterpret_cast<EncodeTiled>(found) : nullptr;
  }();
  return function;
}

// `dimensions` from the innermost; `pitches` in bytes, of all but that one; `box`: what one copy brings.
template <int kDimensions>
bool encode(CUtensorMap& map, const void* data, const cuuint64_t (&dimensions)[kDimensions],
            const cuuint64_t (&pitches)[kDimensions - 1], const cuuint32_t (&box)[kDimensions]) {
  cuuint32_t ones[kDimensions];
  for (cuuint32_t& one : ones) one = 1;
  return encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kDimensions, const_cast<void*>(data), dimensions, pitches, box, ones,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

using Product = void (*)(CUtensorMap, CUtensorMap, CUtensorMap, FusedHeadArgs, bool);

// Blocks of a kernel that run at once on a device, asked once; 0 where it has no memory to tell.
template <FusedPass kPass, bool kSoftcap>
int resident_blocks(int device) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  if (device < kDevices && known[device] != 0) return known[device];
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = kCluster;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaFuncSetAttribute(product<kPass, kSoftcap>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes) ||
      cudaOccupancyMaxActiveClusters(&clusters, product<kPass, kSoftcap>, &config)) {
    return 0;
  }
  if (device < kDevices) known[device] = clusters * kCluster;
  return clusters * kCluster;
}

struct Kernel {
  Product product;
  int (*resident_blocks)(int device);
};

template <bool kSoftcap>
Kernel kernel_of(FusedPass pass) {
  switch (pass) {
    case FusedPass::statistics:
      return {product<FusedPass::statistics, kSoftcap>, resident_blocks<FusedPass::statistics, kSoftcap>};
    case FusedPass::exponentials:
      return {product<FusedPass::exponentials, kSoftcap>, resident_blocks<FusedPass::exponentials, kSoftcap>};
    default: return {product<FusedPass::gradients, kSoftcap>, resident_blocks<FusedPass::gradients, kSoftcap>};
  }
}

struct Maps {
  CUtensorMap hidden, groups, pairs;
};

// Hidden states as they are, and the vocabulary in its groups and its pairs. A dimension must not be 0: without a whole group, none
// of that one is copied but what lies behind it, which is zeros.
bool encode_operands(const FusedHeadArgs& args, Maps& maps) {
  const cuuint64_t width = args.width, rows = args.row.rows, columns = args.row.columns;
  const cuuint64_t groups = columns < kPermuted ? 1 : columns / kPermuted;
  return encode<2>(maps.hidden, args.hidden, {width, rows}, {2 * width}, {kDepth, kTileRows}) &&
         encode<5>(maps.groups, args.weight, {width, 2, 4, 4, groups}, {2 * width, 16 * width, 4 * width, 64 * width},
                   {kDepth, 2, 4, 4, kHalfStrip / kPermuted}) &&
         encode<2>(maps.pairs, args.weight, {width, columns}, {2 * width}, {kDepth, 2});
}

template <bool kSoftcap>
int launch(const FusedHeadArgs& args, cudaStream_t stream) {
  Maps maps;
  if (!encode_operands(args, maps)) return cudaErrorInvalidValue;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  const Kernel kernel = kernel_of<kSoftcap>(args.pass);
  const int blocks = kernel.resident_blocks(device);
  if (blocks == 0) {
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? cudaErrorNotSupported : error;
  }
  const auto multiply_all = [&](bool again) {
    kernel.product<<<blocks, kThreads, kSharedBytes, stream>>>(maps.hidden, maps.groups, maps.pairs, args, again);
  };
  if (args.pass == FusedPass::gradients) {
    multiply_all(false);
    return launch_status();
  }
  shifts<kSoftcap><<<(args.row.rows + kRowWarps - 1) / kRowWarps, kRowWarps * kLanes, 0, stream>>>(args);
  for (const bool again : {false, true}) {
    multiply_all(again);
    finish<kSoftcap><<<(args.row.rows + kLanes - 1) / kLanes, kFinishWarps * kLanes, 0, stream>>>(args, again);
  }
  return launch_status();
}

// Whether a device is of compute capability 9.0, and its driver encodes such copies; -1 where it has no memory to tell.
int serves(int device) {
  int major = 0, minor = 0, before = 0;
  const bool known = !cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) &&
                     !cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) && !cudaGetDevice(&before);
  if (!known) cudaGetLastError();
  if (!known || major != 9 || minor != 0 || encode_tiled() == nullptr) return 0;
  FusedHeadArgs args{};
  args.row.rows = 1, args.row.columns = kPermuted, args.width = 8;
  args.hidden = args.weight = reinterpret_cast<const void*>(std::uintptr_t{1} << 20);  // nothing is read
  Maps maps;
  // The driver encodes nothing before the device has a context.
  cudaError_t error = before == device ? cudaSuccess : cudaSetDevice(device);
  if (!error) error = cudaFree(nullptr);
  const bool encoded = !error && encode_operands(args, maps);
  if (before != device) cudaSetDevice(before);
  cudaGetLastError();  // an answer, not an error of the next launch
  return error == cudaErrorMemoryAllocation ? -1 : encoded;
}

}  // namespace
}  // namespace fastgrpo

FASTGRPO_EXPORT int fastgrpo_fused_head(const fastgrpo::FusedHeadArgs* args, void* stream) {
  using namespace fastgrpo;
  if (args->row.rows == 0) return 0;
  if (encode_tiled() == nullptr) return cudaErrorNotSupported;
  const auto on = static_cast<cudaStream_t>(stream);
  return args->row.softcap > 0.f ? launch<true>(*args, on) : launch<false>(*args, on);
}

FASTGRPO_EXPORT int fastgrpo_fused_head_strips(int columns) {
  using namespace fastgrpo;
  return (columns + kStrip - 1) / kStrip;
}

FASTGRPO_EXPORT int fastgrpo_fused_head_serves(int device) { return fastgrpo::serves(device); }
