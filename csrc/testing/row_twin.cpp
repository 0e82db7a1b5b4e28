// cuda/row.h on the CPU: a row's statistics and 16-bit gradients by the functions that both row kernels inline, for tests/csrc. What is
// not here is how threads and blocks share a row; gradients may lie over it as they do there: a vector of them is stored when its
// logits, and those before, are read. Built by the tests themselves; never in a wheel.
#define __HIPCC__
#include "hip/hip_runtime.h"

#include "../cuda/row.h"

using namespace fastgrpo;

namespace {

void to_logits_of(const Row& row, int vector, float (&four)[4]) {
  float4 z = load(row, vector);
  to_logits(row, vector, z);
  four[0] = z.x, four[1] = z.y, four[2] = z.z, four[3] = z.w;
}

template <GradDtype kDtype, bool kSoftcap>
void write_gradients(const RowArgs& args, const Row& row, long long index, const RowScalars& scalars) {
  auto* grads = grad_row<kDtype>(args.grad, args.grad_pitch, index);
  auto* second = args.second_grad == nullptr ? nullptr : grad_row<kDtype>(args.second_grad, args.second_pitch, index);
  const float inverse_outer = kSoftcap ? args.temperature / args.softcap : 0.f;
  for (int vector = 0; vector < row.vectors(); ++vector) {
    float z[4];
    to_logits_of(row, vector, z);
    const float4 four{z[0], z[1], z[2], z[3]};
    store4<kDtype, kSoftcap>(grads, vector, four, scalars.shift2, scalars.first, inverse_outer);
    if (second != nullptr) store4<kDtype, kSoftcap>(second, vector, four, scalars.shift2, scalars.second, inverse_outer);
    if (vector != row.target_vector) continue;
    grads[row.target] = Grad16<kDtype>::round(scalars.first.at_target);
    if (second != nullptr) second[row.target] = Grad16<kDtype>::round(scalars.second.at_target);
  }
}

template <GradDtype kDtype>
void rows_of(const RowArgs& args) {
  for (long long index = 0; index < args.rows; ++index) {
    const int target = target_of(args, index);
    if (target < 0) {
      write_ignored_row<kDtype>(args, index, 0, 1);
      continue;
    }
    const Row row = make_row(args, index, target);
    const float z_target = target_logit(row);
    Partial others;
    for (int vector = 0; vector < row.vectors(); ++vector) {
      float z[4];
      to_logits_of(row, vector, z);
      for (const float logit : z) {
        if (!(logit <= kNoLogit)) others = push(others, logit);
      }
    }
    RowScalars scalars = args.coefficients == Coefficients::given ? given_scalars<kDtype>(args, index, true)
                                                                  : finish_row<kDtype>(args, index, others, z_target, true);
    apply_scale(args, z_target, scalars);
    if (args.grad == nullptr) continue;
    if (row.softcap) {
      write_gradients<kDtype, true>(args, row, index, scalars);
    } else {
      write_gradients<kDtype, false>(args, row, index, scalars);
    }
  }
}

}  // namespace

extern "C" void row_twin(const RowArgs* args) {
  if (args->grad_dtype == GradDtype::float16) return rows_of<GradDtype::float16>(*args);
  rows_of<GradDtype::bfloat16>(*args);
}
