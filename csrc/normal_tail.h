// The upper tail of the normal distribution for a >= 0, as both devices compute it:
//
//     Q(a) = 1 - Phi(a) = exp(-a^2 / 2) r P(1 - 8 r),   r = 1 / (a + 4)
//
// r P is Mills' ratio divided by sqrt(2 pi). P is a minimax polynomial from Lawson's algorithm on 0
// <= a <= 14.5, with a relative error of 9e-9. This file holds plain constants only, because the
// CPU kernels include it once per instruction-set level.

#pragma once

namespace fastbert::normal_tail {

constexpr float kShift = 4.0f;
constexpr float kSlope = -8.0f;
constexpr int kDegree = 9;
constexpr float kDensityAtZero = 0.3989422804f;  // 1 / sqrt(2 pi)

}  // namespace fastbert::normal_tail

// The coefficients, highest power first. They are a macro, because device code cannot read a host
// array, not even a constexpr one.
#define FASTBERT_NORMAL_TAIL_POLYNOMIAL                                                          \
  {-1.319718455e-04f, 1.793541397e-04f,  1.569923476e-03f, -3.512553890e-03f, -7.525271317e-03f, \
   6.040383107e-02f,  -1.865234415e-01f, 3.871369011e-01f, -6.078965883e-01f, 7.552851354e-01f}
