// The rows that a call computes, in ascending order: those with a target in [0, vocabulary), in two lists.
//
//   wanted   first or second is not 0 (NaN is not 0), or neither is given
//   others   the rest of them
//
// One block walks over the rows, 4 a thread at a time: flags -> scan of both counts, packed into one number -> stores. About 2
// microseconds for 4096 rows: less than a second launch would cost at the sizes of a micro-batch. Bytes: 4 or 8 a target, 8 a row.
#include "compact.h"

#include "../export.h"
#include "block.h"

namespace fastgrpo {
namespace {

constexpr int kThreads = 1024;
constexpr int kRows = 4;
constexpr int kStep = kThreads * kRows;
constexpr int kShift = 16;
static_assert(kStep < 1 << (kShift - 1), "the count of others is packed above the count of wanted rows");

__global__ void __launch_bounds__(kThreads) compact(const __grid_constant__ CompactArgs args) {
  __shared__ int slots[kThreads / kGroup];
  const Ids targets{args.targets, args.targets_are_64_bit};
  const bool all = args.first == nullptr && args.second == nullptr;
  std::int64_t wanted_before = 0, others_before = 0;
  for (std::int64_t base = 0; base < args.rows; base += kStep) {
    const std::int64_t start = base + threadIdx.x * kRows;
    unsigned wanted = 0, others = 0;
    int count = 0;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const std::int64_t row = start + k;
      if (row >= args.rows) continue;
      const std::int64_t target = targets[row];
      if (target < 0 || target >= args.vocabulary) continue;
      const bool is_wanted = all || (args.first != nullptr && args.first[row] != 0.f) ||
                             (args.second != nullptr && args.second[row] != 0.f);
      wanted |= static_cast<unsigned>(is_wanted) << k;
      others |= static_cast<unsigned>(!is_wanted) << k;
      count += is_wanted ? 1 : 1 << kShift;
    }
    int total;
    const int before = exclusive_scan_block<kThreads>(count, slots, total);
    std::int64_t next_wanted = wanted_before + before % (1 << kShift), next_other = others_before + (before >> kShift);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (wanted >> k & 1) args.wanted[next_wanted++] = start + k;
      if ((others >> k & 1) && args.others != nullptr) args.others[next_other++] = start + k;
    }
    wanted_before += total % (1 << kShift);
    others_before += total >> kShift;
  }
  if (threadIdx.x > 0) return;
  const bool valid = args.valid == nullptr || *args.valid != 0;
  *args.counts = valid ? wanted_before | others_before << 32 : -1;
}

}  // namespace
}  // namespace fastgrpo

FASTGRPO_EXPORT int fastgrpo_compact(const fastgrpo::CompactArgs* args, void* stream) {
  using namespace fastgrpo;
  compact<<<1, kThreads, 0, static_cast<Stream>(stream)>>>(*args);
  return launch_status();
}
