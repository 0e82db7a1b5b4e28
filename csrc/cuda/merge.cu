// Two softmaxes over different keys into one: with l = log(e^a + e^b) of their log-sum-exps a and b,
//
//     out = e^(a - l) out + e^(b - l) more
//
// A thread merges eight values of one head of one token, in fp32, and rounds once. 2 + 2 + 2 bytes a value; the tokens that
// have nothing to merge are left where they are.
#include "merge.h"

#include "../export.h"
#include "eight.h"

namespace fastgrpo {
namespace {

constexpr int kThreads = 256;
constexpr int kValues = 8;

template <GradDtype kDtype>
__global__ void merge_attention(uint4* out, const float* lse, const uint4* more, const float* more_lse,
                                const bool* continued, float* merged_lse, int tokens, int heads, int pieces) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t of_token = i / pieces;  // token * heads + head
  if (of_token >= static_cast<std::int64_t>(tokens) * heads) return;
  const int piece = static_cast<int>(i % pieces), head = static_cast<int>(of_token % heads);
  const int token = static_cast<int>(of_token / heads);
  const std::int64_t at = static_cast<std::int64_t>(head) * tokens + token;
  const float own = lse[at];
  if (!continued[token]) {
    if (piece == 0) merged_lse[at] = own;
    return;
  }
  const float other = more_lse[at];
  const float peak = own > other ? own : other;
  const float total = peak + logf(expf(own - peak) + expf(other - peak));
  if (piece == 0) merged_lse[at] = total;
  const float by_own = expf(own - total), by_other = expf(other - total);
  Eight x = widen<kDtype>(out[i]);
  const Eight y = widen<kDtype>(more[i]);
#pragma unroll
  for (int j = 0; j < kValues; ++j) x.x[j] = x.x[j] * by_own + y.x[j] * by_other;
  out[i] = round8<kDtype>(x);
}

}  // namespace
}  // namespace fastgrpo

FASTGRPO_EXPORT int fastgrpo_merge_attention(void* out, const float* lse, const void* more, const float* more_lse,
                                             const bool* continued, float* merged_lse, fastgrpo::GradDtype dtype, int tokens,
                                             int heads, int width, void* stream) {
  using namespace fastgrpo;
  const int pieces = width / kValues;
  const std::int64_t count = static_cast<std::int64_t>(tokens) * heads * pieces;
  if (count == 0) return 0;
  const auto kernel =
      dtype == GradDtype::bfloat16 ? merge_attention<GradDtype::bfloat16> : merge_attention<GradDtype::float16>;
  kernel<<<(count + kThreads - 1) / kThreads, kThreads, 0, static_cast<Stream>(stream)>>>(
      static_cast<uint4*>(out), lse, static_cast<const uint4*>(more), more_lse, continued, merged_lse, tokens, heads, pieces);
  return launch_status();
}
