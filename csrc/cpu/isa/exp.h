// The exponential of each lane of a register, for the softmax and the activations. A multiple of ln
// 2, which is split in two parts, is subtracted from the argument (Cody and Waite 1980), and a
// polynomial approximates the exponential of the remainder.

#pragma once

#include "vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// Returns exp(-u) for u >= 0 with a relative error of about 1e-7. For u > 87, where exp(-u) is
// close to the smallest normal float, the result is 0. If u is NaN, the result is arbitrary, and
// the caller must restore the NaN.
FASTBERT_INLINE Vec exp_negative(Vec u) {
  // Adding 1.5 * 2^23 rounds to an integer. The low bits of the sum's mantissa are this integer.
  constexpr float kRound = 12582912.0f;
  const Vec shifted = fma(u, splat(-1.44269504f), splat(kRound));
  const Vec n = shifted - kRound;
  // ln 2 is split in two parts. The first part has few bits, so its product with n is exact.
  const Vec r = fma(n, splat(-1.42860682e-6f), fma(n, splat(-0x1.62e4p-1f), -u));
  // exp(r) is approximated by 1 + r + r^2 q(r) with a polynomial q, for |r| <= ln 2 / 2.
  Vec q = fma(splat(1.381432036e-03f), r, splat(8.368851085e-03f));
  q = fma(q, r, splat(4.166840109e-02f));
  q = fma(q, r, splat(1.666651952e-01f));
  q = fma(q, r, splat(4.999999337e-01f));
  const Vec e = fma(q * r, r, r) + 1.0f;
  const Vec scaled = (Vec)((IntVec)e + ((IntVec)shifted << 23));
  return select(u > 87.0f, Vec{}, scaled);
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
