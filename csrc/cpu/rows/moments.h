// The mean of a row in fp32, and the reciprocal of the standard deviation of the row.

#pragma once

#include "../isa/vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

struct Moments {
  float mean, correction, rstd;  // mean + correction has about twice the precision of fp32.
};

// Computes the moments of a row in double precision. This is necessary for rows with elements near
// 1e30, whose squared deviations overflow in fp32.
inline __attribute__((noinline)) Moments wide_moments(const float* sum, int64_t columns,
                                                      float eps) {
  double total = 0.0, squares = 0.0;
  for (int64_t n = 0; n < columns; ++n) total += sum[n];
  const double mean = total / (double)columns;
  for (int64_t n = 0; n < columns; ++n) squares += (sum[n] - mean) * (sum[n] - mean);
  const double variance = squares / (double)columns;
  const float rounded = (float)mean;
  return {rounded, (float)(mean - rounded), (float)(1.0 / __builtin_sqrt(variance + eps))};
}

FASTBERT_INLINE Moments moments(const float* sum, Vec (&totals)[kSums], int64_t columns,
                                float eps) {
  const float mean = (float)mean_of(totals, columns);
  Vec deviations[kSums] = {}, squares[kSums] = {};
  for_each_summand(columns, [&](int64_t n, int u, int count) __attribute__((always_inline)) {
    const Vec d = first_lanes(load(sum + n, count) - mean, count);
    deviations[u] += d;
    squares[u] = fma(d, d, squares[u]);
  });
  const double correction = mean_of(deviations, columns);
  const double variance = mean_of(squares, columns) - correction * correction;
  if (!(variance < __builtin_inf())) return wide_moments(sum, columns, eps);
  const double positive = variance > 0.0 ? variance : 0.0;
  return {mean, (float)correction, (float)(1.0 / __builtin_sqrt(positive + eps))};
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
