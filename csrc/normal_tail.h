// The upper tail Q of the standard normal distribution for a >= 0, as the CPU and the CUDA code
// compute it:
//
//     Q(a) = 1 - Phi(a) = exp(-a^2 / 2) r P(1 - 8 r),   r = 1 / (a + 4)
//
// Phi is the cumulative distribution function, so Q(a) is the probability of a value above a. The
// product r P is Mills' ratio divided by sqrt(2 pi). P is a minimax polynomial with a relative
// error of 9e-9 for 0 <= a <= 14.5, computed by Lawson's algorithm. This file contains constants
// but no functions, because the CPU kernels include it once per instruction-set level.

#pragma once

namespace fastbert::normal_tail {

constexpr float kShift = 4.0f;
constexpr float kSlope = -8.0f;
constexpr int kDegree = 9;
constexpr float kDensityAtZero = 0.3989422804f;  // 1 / sqrt(2 pi)

}  // namespace fastbert::normal_tail

// The coefficients of the polynomial P, from the highest power to the lowest. They are defined as a
// macro, because device code cannot read an array of host code, even if the array is constexpr.
#define FASTBERT_NORMAL_TAIL_POLYNOMIAL                                                          \
  {-1.319718455e-04f, 1.793541397e-04f,  1.569923476e-03f, -3.512553890e-03f, -7.525271317e-03f, \
   6.040383107e-02f,  -1.865234415e-01f, 3.871369011e-01f, -6.078965883e-01f, 7.552851354e-01f}
