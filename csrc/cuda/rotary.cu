// Rotary position embeddings (Su et al. 2021) as transformers applies them: the halves a and b of a head are rotated,
//
//     a' = a cos - b sin        b' = b cos + a sin          (transposed: the sign of sin the other way round)
//
// with a cosine and a sine for each position and each number of a head. A thread rotates eight numbers of each half of one
// head of one token, in fp32, and rounds once. 2 + 2 bytes a number; cosines and sines come from the caches.
#include "rotary.h"

#include "../export.h"
#include "eight.h"

namespace fastgrpo {
namespace {

constexpr int kThreads = 256;
constexpr int kValues = 8;

template <GradDtype kDtype, bool kTransposed>
__global__ void rotary(const uint4* query, const uint4* key, const uint4* cos, const uint4* sin, uint4* out_query,
                       uint4* out_key, int tokens, int query_heads, int key_heads, int pieces) {
  const int heads = query_heads + key_heads;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t of_token = i / pieces;
  if (of_token >= static_cast<std::int64_t>(tokens) * heads) return;
  const int piece = static_cast<int>(i % pieces), head = static_cast<int>(of_token % heads);
  const std::int64_t token = of_token / heads;
  const bool is_query = head < query_heads;
  const std::int64_t row = is_query ? token * query_heads + head : token * key_heads + head - query_heads;
  const std::int64_t first = row * 2 * pieces + piece, second = first + pieces;
  const std::int64_t angle = token * 2 * pieces + piece;
  const uint4* from = is_query ? query : key;
  const Eight a = widen<kDtype>(from[first]), b = widen<kDtype>(from[second]);
  const Eight cos_a = widen<kDtype>(cos[angle]), cos_b = widen<kDtype>(cos[angle + pieces]);
  const Eight sin_a = widen<kDtype>(sin[angle]), sin_b = widen<kDtype>(sin[angle + pieces]);
  Eight new_a, new_b;
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    new_a.x[j] = kTransposed ? a.x[j] * cos_a.x[j] + b.x[j] * sin_b.x[j] : a.x[j] * cos_a.x[j] - b.x[j] * sin_a.x[j];
    new_b.x[j] = kTransposed ? b.x[j] * cos_b.x[j] - a.x[j] * sin_a.x[j] : b.x[j] * cos_b.x[j] + a.x[j] * sin_b.x[j];
  }
  uint4* to = is_query ? out_query : out_key;
  to[first] = round8<kDtype>(new_a);
  to[second] = round8<kDtype>(new_b);
}

}  // namespace
}  // namespace fastgrpo

FASTGRPO_EXPORT int fastgrpo_rotary(const void* query, const void* key, const void* cos, const void* sin, void* out_query,
                                    void* out_key, fastgrpo::GradDtype dtype, int tokens, int query_heads, int key_heads,
                                    int width, bool transposed, void* stream) {
  using namespace fastgrpo;
  const int pieces = width / (2 * kValues);
  const std::int64_t count = static_cast<std::int64_t>(tokens) * (query_heads + key_heads) * pieces;
  if (count == 0) return 0;
  constexpr auto bfloat16 = GradDtype::bfloat16, float16 = GradDtype::float16;
  const auto kernel = dtype == bfloat16 ? (transposed ? rotary<bfloat16, true> : rotary<bfloat16, false>)
                                        : (transposed ? rotary<float16, true> : rotary<float16, false>);
  const auto at = [](const void* pointer) { return static_cast<const uint4*>(pointer); };
  kernel<<<(count + kThreads - 1) / kThreads, kThreads, 0, static_cast<Stream>(stream)>>>(
      at(query), at(key), at(cos), at(sin), static_cast<uint4*>(out_query), static_cast<uint4*>(out_key), tokens, query_heads,
      key_heads, pieces);
  return launch_status();
}
