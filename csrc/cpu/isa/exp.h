// The exponential of a register.

#pragma once

#include "vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// exp(-u) for u >= 0, flushed to 0 above 87 where it leaves the normal floats; relative error
// ~1e-7. NaN gives garbage: callers multiply by their own NaN.
FASTBERT_INLINE Vec exp_negative(Vec u) {
  // Adding 1.5 * 2^23 rounds to an integer, left in the low mantissa bits.
  constexpr float kRound = 12582912.0f;
  const Vec shifted = fma(u, splat(-1.44269504f), splat(kRound));
  const Vec n = shifted - kRound;
  // ln 2 in two parts; the first has few bits, so that its product with n is exact.
  const Vec r = fma(n, splat(-1.42860682e-6f), fma(n, splat(-0x1.62e4p-1f), -u));
  // exp(r) = 1 + r + r^2 q(r), |r| <= ln 2 / 2.
  Vec q = fma(splat(1.381432036e-03f), r, splat(8.368851085e-03f));
  q = fma(q, r, splat(4.166840109e-02f));
  q = fma(q, r, splat(1.666651952e-01f));
  q = fma(q, r, splat(4.999999337e-01f));
  const Vec e = fma(q * r, r, r) + 1.0f;
  const Vec scaled = (Vec)((IntVec)e + ((IntVec)shifted << 23));
  return select(u > 87.0f, Vec{}, scaled);
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
