// What the kernels of swiglu.cu take.
#pragma once

#include <cstdint>

#include "pack.h"

// Each returns the runtime's code, 0 for success. Pointers are to device memory, 16-byte aligned, with `count` numbers of one
// dtype behind each, a multiple of 8. What is written may lie over what is read, number by number. `stream` as in row_args.h.
extern "C" {
// product[i] = round(silu(gate[i]) * up[i]).
int fastgrpo_swiglu(const void* gate, const void* up, void* product, fastgrpo::RowDtype dtype, std::int64_t count, void* stream);
// What gate and up receive from the product's gradient, and the product once more, or null.
int fastgrpo_swiglu_grad(const void* gate, const void* up, const void* grad, void* grad_gate, void* grad_up, void* product,
                         fastgrpo::RowDtype dtype, std::int64_t count, void* stream);
}
