// A block walks over a row of logits; serves any row length on any device.
//
//   statistics   read once, in rounds of kVectors 16-byte loads a thread, the next round under way while one is summed
//   gradients    read once more, and written 16 bit over the first half of the row or elsewhere; with saved statistics
//                this is the only read
// Bytes: 4 a logit for statistics, 4 + 4 + 2 with gradients, 4 + 2 for gradients from saved statistics.
// Writing over the row is safe in ascending rounds with one barrier a round: the gradients of a round lie where logits of
// earlier rounds were, or (first round, and 16-bit logits) of this one, and all of those are in registers.
// 16-bit logits take half of the bytes of every read, and gradients of their own dtype.
// Registers: 2 x kVectors x 4 of logits, two blocks a multiprocessor. Shared memory: a few dozen scalars.
#include "../export.h"
#include "row.h"

namespace fastgrpo {
namespace {

constexpr int kThreads = 512;
constexpr int kVectors = 2;
constexpr int kRound = kThreads * kVectors;

struct Round {
  float4 z[kVectors];
};

template <LogitsDtype kLogits>
__device__ __forceinline__ Round load_round(const Row& row, int first, int vectors) {
  Round round;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int vector = first + k * kThreads;
    round.z[k] = vector < vectors ? load<kLogits>(row, vector) : no_logits();
  }
  return round;
}

__device__ __forceinline__ void to_logits(const Row& row, int first, int vectors, Round& round) {
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int vector = first + k * kThreads;
    if (vector < vectors) to_logits(row, vector, round.z[k]);
  }
}

template <LogitsDtype kLogits>
__device__ __forceinline__ Partial row_partial(const Row& row) {
  const int vectors = row.vectors();
  float max = kNoLogit, sum = 0.f, weighted2 = 0.f;
  Round next = load_round<kLogits>(row, threadIdx.x, vectors);
  for (int first = threadIdx.x; first < vectors; first += kRound) {
    Round round = next;
    next = load_round<kLogits>(row, first + kRound, vectors);
    to_logits(row, first, vectors, round);
    float larger = max;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) larger = fmaxf(larger, max4(round.z[k]));
    if (larger > max) {
      const Partial moved = rescale(make_partial(max, sum, weighted2), larger);
      max = larger, sum = moved.sum, weighted2 = moved.weighted * kLog2e;
    }
    // Where there was no logit yet, anything but kNoLogit itself makes their exp 0.
    const float shift2 = max > kNoLogit ? max * kLog2e : 0.f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) add4(round.z[k], shift2, sum, weighted2);
  }
  return make_partial(max, sum, weighted2);
}

template <GradDtype kDtype, LogitsDtype kLogits, bool kSoftcap>
__device__ __forceinline__ void write_gradients(const RowArgs& args, const Row& row, long long index,
                                                const RowScalars& scalars) {
  auto* grads = grad_row<kDtype>(args.grad, args.grad_pitch, index);
  auto* second = args.second_grad == nullptr ? nullptr : grad_row<kDtype>(args.second_grad, args.second_pitch, index);
  const float inverse_outer = kSoftcap ? args.temperature / args.softcap : 0.f;
  const int vectors = row.vectors();
  Round next = load_round<kLogits>(row, threadIdx.x, vectors);
  for (int start = 0; start < vectors; start += kRound) {
    const int first = start + threadIdx.x;
    Round round = next;
    next = load_round<kLogits>(row, first + kRound, vectors);
    to_logits(row, first, vectors, round);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int vector = first + k * kThreads;
      if (vector >= vectors) break;
      store4<kDtype, kSoftcap>(grads, vector, round.z[k], scalars.shift2, scalars.first, inverse_outer);
      if (second != nullptr) {
        store4<kDtype, kSoftcap>(second, vector, round.z[k], scalars.shift2, scalars.second, inverse_outer);
      }
      if (vector == row.target_vector) {
        grads[row.target] = Grad16<kDtype>::round(scalars.first.at_target);
        if (second != nullptr) second[row.target] = Grad16<kDtype>::round(scalars.second.at_target);
      }
    }
  }
}

template <GradDtype kDtype, LogitsDtype kLogits>
__global__ void __launch_bounds__(kThreads, 2) row_streamed(const __grid_constant__ RowArgs args) {
  __shared__ Slot slots[kThreads / kLanes];
  __shared__ RowScalars shared;
  const long long index = blockIdx.x;
  const int target = target_of(args, index);
  if (target < 0) return write_ignored_row<kDtype>(args, index, threadIdx.x, kThreads);
  const Row row = make_row<kLogits>(args, index, target);
  const float z_target = threadIdx.x < kLanes ? target_logit<kLogits>(row) : 0.f;
  const bool given = args.coefficients == Coefficients::given;
  Partial others;
  if (!given) others = combine_block<kThreads>(row_partial<kLogits>(row), slots);
  if (threadIdx.x < kLanes) {
    const bool writer = threadIdx.x == 0;
    RowScalars scalars =
        given ? given_scalars<kDtype>(args, index, writer) : finish_row<kDtype>(args, index, others, z_target, writer);
    apply_scale(args, z_target, scalars);
    if (writer) shared = scalars;
  }
  if (args.grad == nullptr) return;
  __syncthreads();
  if (row.softcap) return write_gradients<kDtype, kLogits, true>(args, row, index, shared);
  write_gradients<kDtype, kLogits, false>(args, row, index, shared);
}

}  // namespace
}  // namespace fastgrpo

FASTGRPO_EXPORT int fastgrpo_row_streamed(const fastgrpo::RowArgs* args, void* stream) {
  using namespace fastgrpo;
  if (args->rows == 0) return 0;
  const bool is_float16 = args->grad_dtype == GradDtype::float16;
  auto kernel = is_float16 ? row_streamed<GradDtype::float16, LogitsDtype::float32>
                           : row_streamed<GradDtype::bfloat16, LogitsDtype::float32>;
  if (args->logits_dtype == LogitsDtype::float16) kernel = row_streamed<GradDtype::float16, LogitsDtype::float16>;
  if (args->logits_dtype == LogitsDtype::bfloat16) kernel = row_streamed<GradDtype::bfloat16, LogitsDtype::bfloat16>;
  kernel<<<args->rows, kThreads, 0, static_cast<Stream>(stream)>>>(*args);
  return launch_status();
}
