// csrc/math on the device: every function, for float and double. Each build proves that they compile for all targets
// without spills; a test on a GPU proves that they give there what they give on a CPU. Built to be checked, not for speed.
//
// softmax:  a thread reads a row of [rows, columns] logits as two interleaved strips and combines them;
//           out [3, rows]: logprob, lse, entropy. 4 or 8 bytes read per logit.
// tokens:   a thread a token; in [6, n]: the fields of TokenInput; out [5, n]: loss, grad, ratio, kl, clip flags as bits.
// sequences: a thread a sequence; in [2, n]: log weight, advantage; out [6, n]: vespo's clamped terms and phi, the sampler
//           ratio truncated and masked, 1 - exp(log weight).
#include <cmath>

#include "../export.h"
#include "../math/objective.h"
#include "../math/online_softmax.h"
#include "device.h"

namespace fastgrpo {
namespace {

constexpr int kThreads = 128;

unsigned blocks(long long n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

__device__ long long thread_index() { return static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x; }

template <typename T>
__global__ void softmax(const T* logits, const int* targets, T* out, long long rows, int columns) {
  const long long row = thread_index();
  if (row >= rows) return;
  const T* z = logits + row * columns;
  const int target = targets[row];
  SoftmaxPartial<T> even, odd;
  for (int v = 0; v < columns; v += 2) {
    if (v != target) even = push(even, z[v]);
    if (v + 1 < columns && v + 1 != target) odd = push(odd, z[v + 1]);
  }
  const SoftmaxResult<T> result = finalize(combine(even, odd), z[target]);
  out[row] = result.logprob;
  out[rows + row] = result.lse;
  out[2 * rows + row] = result.entropy;
}

template <typename T>
__global__ void tokens(ObjectiveParams params, const T* in, T* out, long long n) {
  const long long i = thread_index();
  if (i >= n) return;
  const TokenTerm<T> term =
      token_term(params, TokenInput<T>{in[i], in[n + i], in[2 * n + i], in[3 * n + i], in[4 * n + i], in[5 * n + i]});
  out[i] = term.loss;
  out[n + i] = term.grad;
  out[2 * n + i] = term.ratio;
  out[3 * n + i] = term.kl;
  out[4 * n + i] = T(term.low_clipped + 2 * term.high_clipped + 4 * term.cispo_clipped);
}

template <typename T>
__global__ void sequences(const T* in, T* out, long long n) {
  const long long i = thread_index();
  if (i >= n) return;
  const T log_weight = in[i], advantage = in[n + i];
  out[i] = vespo_log_ratio(log_weight);
  out[n + i] = vespo_log_sampler(std::exp(log_weight));
  out[2 * n + i] = vespo_phi(log_weight, advantage, T(2), T(3), T(3), T(2));
  out[3 * n + i] = sampler_ratio(log_weight, SamplerClip::truncate, T(0), T(3));
  out[4 * n + i] = sampler_ratio(log_weight, SamplerClip::mask, T(0), T(3));
  out[5 * n + i] = target_complement(log_weight);
}

}  // namespace
}  // namespace fastgrpo

// Device pointers throughout; `is_double` names the type of in and out. Each returns the runtime's code, 0 for success.

FASTGRPO_EXPORT int fastgrpo_check_softmax(int is_double, const void* logits, const int* targets, void* out, long long rows,
                                           int columns, fastgrpo::Stream stream) {
  using namespace fastgrpo;
  if (is_double) {
    softmax<double><<<blocks(rows), kThreads, 0, stream>>>(static_cast<const double*>(logits), targets,
                                                           static_cast<double*>(out), rows, columns);
  } else {
    softmax<float><<<blocks(rows), kThreads, 0, stream>>>(static_cast<const float*>(logits), targets,
                                                          static_cast<float*>(out), rows, columns);
  }
  return launch_status();
}

FASTGRPO_EXPORT int fastgrpo_check_tokens(int is_double, const fastgrpo::ObjectiveParams* params, const void* in, void* out,
                                          long long n, fastgrpo::Stream stream) {
  using namespace fastgrpo;
  if (is_double) {
    tokens<double><<<blocks(n), kThreads, 0, stream>>>(*params, static_cast<const double*>(in), static_cast<double*>(out), n);
  } else {
    tokens<float><<<blocks(n), kThreads, 0, stream>>>(*params, static_cast<const float*>(in), static_cast<float*>(out), n);
  }
  return launch_status();
}

FASTGRPO_EXPORT int fastgrpo_check_sequences(int is_double, const void* in, void* out, long long n,
                                             fastgrpo::Stream stream) {
  using namespace fastgrpo;
  if (is_double) {
    sequences<double><<<blocks(n), kThreads, 0, stream>>>(static_cast<const double*>(in), static_cast<double*>(out), n);
  } else {
    sequences<float><<<blocks(n), kThreads, 0, stream>>>(static_cast<const float*>(in), static_cast<float*>(out), n);
  }
  return launch_status();
}
