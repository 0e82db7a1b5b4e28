// The gate of a transformer's MLP (SwiGLU, Shazeer 2020, eq. 6) and its gradients, for one number of each:
//
//   product = silu(gate) up,  silu(x) = x s(x),  s(x) = 1 / (1 + exp(-x)),  silu'(x) = s(x) + silu(x) (1 - s(x))
#pragma once

#include <cmath>

#include "scalar.h"

namespace fastgrpo {

template <typename T>
struct SwigluGrad {
  T gate, up;  // what they receive
  T product;   // once more
};

// On a CUDA device in two instructions and to 2 units in the last place: a division by the book takes as many as all the rest.
FASTGRPO_HD inline float inverse(float x) {
#if defined(__CUDA_ARCH__)
  return __fdividef(1.f, x);
#else
  return 1.f / x;
#endif
}
FASTGRPO_HD inline double inverse(double x) { return 1. / x; }

template <typename T>
FASTGRPO_HD inline T sigmoid(T x) {
  return inverse(T(1) + std::exp(-x));
}

template <typename T>
FASTGRPO_HD inline T swiglu(T gate, T up) {
  return gate * sigmoid(gate) * up;
}

template <typename T>
FASTGRPO_HD inline SwigluGrad<T> swiglu_grad(T gate, T up, T grad) {
  const T share = sigmoid(gate), silu = gate * share;
  return {grad * up * (share + silu * (T(1) - share)), grad * silu, silu * up};
}

}  // namespace fastgrpo
