// What the GRPO objective needs beside the logits: coefficients of every row before them, sums over rows after them.
//
//   grpo_rows   which rows count, their advantages, sampler ratios, vespo's phi, and what each token's loss and entropy weigh
//   grpo_sums   the loss and what the metrics are made of, from the log-probs: sums over all tokens and sequences
//
// A block a sequence; its threads take the rows in turn. grpo_rows counts all rows again in every block where a normaliser needs
// it: 8 bytes a row from the L2, cheaper than a launch between two passes. grpo_sums adds in double, in a fixed order: within
// a thread, over the block's tree, then one group of lanes a column over the sequences; the same inputs give the same bits.
// Bytes: about 40 a row and kernel. The formulas are csrc/math/objective.h.
#include "grpo.h"

#include "../export.h"
#include "block.h"

namespace fastgrpo {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float at(const float* values, std::int64_t i, float missing) {
  return values == nullptr ? missing : values[i];
}

struct Span {
  std::int64_t begin, end;
};

// Within the rows, whatever the segments hold: what is wrong with them is for the host to say. Without segments, `sequences`
// parts of about one size.
__device__ __forceinline__ Span span_of(const Ids& segments, int sequence, int sequences, std::int64_t rows) {
  if (segments.data == nullptr) return {rows * sequence / sequences, rows * (sequence + 1) / sequences};
  const std::int64_t begin = segments[sequence], end = segments[sequence + 1];
  return {begin < 0 ? 0 : begin, end > rows ? rows : end};
}

__device__ __forceinline__ std::int64_t counted_target(const GrpoRowsArgs& args, std::int64_t row) {
  const std::int64_t target = Ids{args.targets, args.targets_are_64_bit}[row];
  return target >= 0 && target < args.vocabulary && (args.mask == nullptr || args.mask[row]) ? target : -1;
}

__device__ __forceinline__ int count_rows(const GrpoRowsArgs& args, const Span& span, int* slots) {
  int mine = 0;
  for (std::int64_t row = span.begin + threadIdx.x; row < span.end; row += kThreads) mine += counted_target(args, row) >= 0;
  return sum_block<kThreads>(mine, slots);
}

__device__ __forceinline__ float denominator_of(const GrpoRowsArgs& args, float tokens, float own) {
  switch (args.normaliser) {
    case Normaliser::items: {
      const float items = args.items != nullptr ? *args.items : tokens * static_cast<float>(args.items_factor);
      return fmaxf(items, 1.f) * static_cast<float>(args.factor);
    }
    case Normaliser::tokens: return fmaxf(tokens, 1.f);
    case Normaliser::constant: return static_cast<float>(args.factor);
    default: return fmaxf(own, 1.f) * static_cast<float>(args.sequences);
  }
}

__global__ void __launch_bounds__(kThreads) grpo_rows(const __grid_constant__ GrpoRowsArgs args) {
  __shared__ int slots[kThreads / kGroup];
  __shared__ double double_slots[kThreads / kGroup];
  const int sequence = blockIdx.x;
  const Ids segments{args.segments, args.segments_are_64_bit};
  const Span span = span_of(segments, sequence, args.sequences, args.rows);
  const bool needs_tokens = args.normaliser == Normaliser::tokens || args.entropy_weights != nullptr ||
                            (args.normaliser == Normaliser::items && args.items == nullptr);
  const float tokens = needs_tokens ? static_cast<float>(count_rows(args, {0, args.rows}, slots)) : 0.f;
  const float own = args.normaliser == Normaliser::sequence ? static_cast<float>(count_rows(args, span, slots)) : 0.f;
  const float accumulation = static_cast<float>(args.accumulation);
  const float weight = 1.f / denominator_of(args, tokens, own) / accumulation;
  const float entropy_weight = static_cast<float>(args.entropy_coef) / fmaxf(tokens, 1.f) / accumulation;

  float log_weight = 0.f;
  if (args.phi != nullptr && args.sampler_ratio != nullptr) {
    if (args.sampler_ratio_per_row) {
      double mine = 0;
      for (std::int64_t row = span.begin + threadIdx.x; row < span.end; row += kThreads) {
        if (counted_target(args, row) >= 0) mine += vespo_log_sampler(args.sampler_ratio[row]);
      }
      log_weight = static_cast<float>(sum_block<kThreads>(mine, double_slots));
    } else {
      log_weight = vespo_log_sampler(args.sampler_ratio[sequence]);
    }
  }
  const auto phi_of = [&](float advantage) {
    return vespo_phi(log_weight, advantage, static_cast<float>(args.k_pos), static_cast<float>(args.lambda_pos),
                     static_cast<float>(args.k_neg), static_cast<float>(args.lambda_neg));
  };
  if (threadIdx.x == 0 && args.phi_of_sequence != nullptr) args.phi_of_sequence[sequence] = phi_of(args.advantages[sequence]);

  for (std::int64_t row = span.begin + threadIdx.x; row < span.end; row += kThreads) {
    const std::int64_t target = counted_target(args, row);
    const bool counts = target >= 0;
    const float advantage = counts ? args.advantages[args.advantages_per_row ? row : sequence] : 0.f;
    args.counted_targets[row] = target;
    args.row_advantages[row] = advantage;
    args.weights[row] = counts ? weight : 0.f;
    if (args.entropy_weights != nullptr) args.entropy_weights[row] = counts ? entropy_weight : 0.f;
    if (args.multiplier != nullptr) {
      args.multiplier[row] = counts ? args.sampler_ratio[args.sampler_ratio_per_row ? row : sequence] : 1.f;
    }
    if (args.phi != nullptr) args.phi[row] = counts ? phi_of(advantage) : 0.f;
  }

  if (sequence == 0 && threadIdx.x < kGroup) {
    std::int64_t shortest = segments[1] - segments[0], longest = shortest;
    for (int i = threadIdx.x; i < args.sequences; i += kGroup) {
      const std::int64_t length = segments[i + 1] - segments[i];
      shortest = length < shortest ? length : shortest;
      longest = length > longest ? length : longest;
    }
#pragma unroll
    for (int mask = kGroup / 2; mask > 0; mask /= 2) {
      const long long low = ptx::shfl_xor(static_cast<long long>(shortest), mask);
      const long long high = ptx::shfl_xor(static_cast<long long>(longest), mask);
      shortest = low < shortest ? low : shortest;
      longest = high > longest ? high : longest;
    }
    if (threadIdx.x == 0) {
      args.sizes[0] = segments[0], args.sizes[1] = segments[args.sequences];
      args.sizes[2] = shortest, args.sizes[3] = longest;
      args.sizes[4] = segments[0] == 0 && segments[args.sequences] == args.rows && shortest >= 0;
    }
  }
}

__device__ __forceinline__ TokenTerm<float> term_of(const GrpoSumsArgs& args, std::int64_t row) {
  const float logprob = args.logprobs[row];
  return token_term(args.params, TokenInput<float>{logprob, at(args.old_logprobs, row, logprob), at(args.ref_logprobs, row, 0.f),
                                                   args.advantages[row], at(args.multiplier, row, 1.f), at(args.phi, row, 1.f)});
}

__global__ void __launch_bounds__(kThreads) grpo_sums_of_sequences(const __grid_constant__ GrpoSumsArgs args) {
  __shared__ double slots[kThreads / kGroup];
  const int sequence = blockIdx.x;
  const Span span = span_of(Ids{args.segments, args.segments_are_64_bit}, sequence, args.sequences, args.rows);
  double mine[kGrpoSums + 1] = {};  // the last one counts
  for (std::int64_t row = span.begin + threadIdx.x; row < span.end; row += kThreads) {
    if (args.counted_targets[row] < 0) continue;
    const TokenTerm<float> term = term_of(args, row);
    const float entropy = at(args.entropy, row, 0.f);
    const float weight = args.weights[row];  // 0: a row whose log-probs may be anything
    const double loss = weight != 0.f ? static_cast<double>(term.loss) * weight : 0;
    mine[sum_loss] += loss - static_cast<double>(at(args.entropy_weights, row, 0.f)) * entropy;
    mine[sum_policy] += loss;
    mine[sum_kl] += term.kl;
    mine[sum_entropy] += entropy;
    mine[sum_low] += term.low_clipped;
    mine[sum_high] += term.high_clipped;
    mine[sum_region] += term.low_clipped || term.high_clipped;
    mine[sum_capped] += term.cispo_clipped;
    mine[sum_phi] += at(args.phi, row, 0.f);
    mine[kGrpoSums] += 1;
  }
#pragma unroll
  for (int k = 0; k <= kGrpoSums; ++k) mine[k] = sum_block<kThreads>(mine[k], slots);
  if (threadIdx.x != 0) return;
  const double tokens = mine[kGrpoSums];
  double low = mine[sum_low] / tokens, high = mine[sum_high] / tokens;
  if (args.sequence_level) {
    // Row-local only on-policy: the ratio is 1.
    const float advantage = args.sequence_advantages[sequence];
    const TokenTerm<float> term = token_term(args.params, TokenInput<float>{0.f, 0.f, 0.f, advantage, 1.f, 1.f});
    low = mine[sum_low] = term.low_clipped;
    high = mine[sum_high] = term.high_clipped;
    mine[sum_region] = term.low_clipped || term.high_clipped;
    mine[sum_capped] = term.cispo_clipped;
  }
  if (args.phi_of_sequence != nullptr) mine[sum_phi] = args.phi_of_sequence[sequence];
  args.clips[sequence] = static_cast<float>(low);
  args.clips[args.sequences + sequence] = static_cast<float>(high);
#pragma unroll
  for (int k = 0; k <= kGrpoSums; ++k) args.partials[static_cast<std::int64_t>(sequence) * (kGrpoSums + 1) + k] = mine[k];
}

// A group of lanes a column; the last column counts the tokens.
__global__ void __launch_bounds__(kGroup * (kGrpoSums + 1)) grpo_sums(const __grid_constant__ GrpoSumsArgs args) {
  __shared__ double tokens;
  const int column = threadIdx.x / kGroup;
  double total = 0;
  for (int i = threadIdx.x % kGroup; i < args.sequences; i += kGroup) {
    total += args.partials[static_cast<std::int64_t>(i) * (kGrpoSums + 1) + column];
  }
  total = sum_group(total);
  if (threadIdx.x == kGroup * kGrpoSums) tokens = total;
  __syncthreads();
  if (threadIdx.x % kGroup != 0 || column == kGrpoSums) return;
  const bool is_clip = column == sum_low || column == sum_high || column == sum_region || column == sum_capped;
  const bool of_sequences = (args.sequence_level && is_clip) || (args.phi_of_sequence != nullptr && column == sum_phi);
  args.sums[2 * column] = static_cast<float>(column == sum_policy ? total * args.policy_scale : total);
  args.sums[2 * column + 1] = of_sequences ? static_cast<float>(args.sequences) : static_cast<float>(tokens);
}

}  // namespace
}  // namespace fastgrpo

FASTGRPO_EXPORT int fastgrpo_grpo_rows(const fastgrpo::GrpoRowsArgs* args, void* stream) {
  using namespace fastgrpo;
  if (args->sequences == 0) return 0;
  grpo_rows<<<args->sequences, kThreads, 0, static_cast<Stream>(stream)>>>(*args);
  return launch_status();
}

FASTGRPO_EXPORT int fastgrpo_grpo_sums(const fastgrpo::GrpoSumsArgs* args, void* stream) {
  using namespace fastgrpo;
  if (args->sequences > 0) {
    grpo_sums_of_sequences<<<args->sequences, kThreads, 0, static_cast<Stream>(stream)>>>(*args);
    if (const int status = launch_status()) return status;
  }
  grpo_sums<<<1, kGroup * (kGrpoSums + 1), 0, static_cast<Stream>(stream)>>>(*args);
  return launch_status();
}
