// How float16 holds the gradients of a row whatever its coefficients are: a power of two is taken out of those of each row, and goes
// back in where the results are fp32. Both are exact.
//
//   size    |g| + 8 |h|: no entry of g d logprob + h d entropy is larger. |d logprob| <= 1. d entropy = -p (log p + H), and with
//           H <= -p log p - (1 - p) log(1 - p) + (1 - p) log(V - 1) it lies between -p (1 - p) (log(V - 1) + log(p / (1 - p)))
//           and 1 / e: below 5.3 for V < 2^29
//   power   2^k <= size < 2^(k + 1), k >= -100; 0 where both are 0; 1 where one of them is NaN or infinite, which then stays so
#pragma once

#include <cmath>

#include "scalar.h"

namespace fastgrpo {

constexpr int kLeastRowPower = -100;

template <typename T>
FASTGRPO_HD inline T row_power(T g, T h) {
  const T size = std::fabs(g) + T(8) * std::fabs(h);
  if (size == T(0)) return T(0);
  if (!(size < kInfinity<T>)) return T(1);
  int exponent;
  std::frexp(size, &exponent);  // size = m 2^exponent, 1/2 <= m < 1
  return std::ldexp(T(1), exponent - 1 < kLeastRowPower ? kLeastRowPower : exponent - 1);
}

}  // namespace fastgrpo
