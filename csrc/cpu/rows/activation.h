// GELU (Hendrycks and Gimpel 2016), ReLU and SiLU, and their derivatives, for one register. `both`
// returns the value of the function, and sets `slope` to the derivative at the same point.
//
// gelu(x) = x Phi(x) with the normal distribution function Phi. The upper tail of the distribution
// is computed directly: Q(a) = 1 - Phi(a) = exp(-a^2 / 2) R(a) for a = |x|. Phi therefore keeps its
// relative accuracy for negative x, where 1 + erf would cancel. The derivative uses the same
// exponential for the density. R is Mills' ratio divided by sqrt(2 pi). It is approximated by r P(1
// - 8 r) with r = 1 / (a + 4) and a minimax polynomial P (Lawson's algorithm on [0, 14.5], relative
// error 9e-9).
//
// gelu_tanh(x) = 0.5 x (1 + tanh(w)) = x s(2 w) with the logistic function s.

#pragma once

#include "../../normal_tail.h"
#include "../isa/exp.h"
#include "../isa/vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

namespace tail = fastbert::normal_tail;

struct Gelu {
  // Returns Phi(x) and sets `bell` to exp(-x^2 / 2).
  static FASTBERT_INLINE Vec distribution(Vec x, Vec& bell) {
    const Vec a = abs(x);
    const Vec r = 1.0f / (a + tail::kShift);
    const Vec t = fma(r, splat(tail::kSlope), splat(1.0f));
    constexpr float kPolynomial[] = FASTBERT_NORMAL_TAIL_POLYNOMIAL;
    Vec p = splat(kPolynomial[0]);
    for (int i = 1; i <= tail::kDegree; ++i) p = fma(p, t, splat(kPolynomial[i]));
    bell = exp_negative(0.5f * a * a);
    const Vec q = bell * (p * r);
    return select(x > 0.0f, 1.0f - q, q);
  }

  static FASTBERT_INLINE Vec forward(Vec x) {
    Vec bell;
    return x * distribution(x, bell);
  }

  // Computes `forward` for registers that will be rounded to bf16, with half of the operations of
  // `forward`. The formula is max(x, 0) - a Q(a) for a = |x|, where Q is the upper tail of the
  // normal distribution. One minimax polynomial (Lawson's algorithm) approximates log2 Q(a).
  // Another one approximates 2^f, where f is the difference between this logarithm and the nearest
  // integer. The relative error is 1e-4 for x >= -4, 2e-4 for x >= -6 and 1.3e-3 for x >= -12.8;
  // half a unit of bf16 is 2e-3 to 4e-3. Below -12.8, the result is the value at -12.8, which is
  // -1.1e-36. Each stage processes all registers, so that the chains of operations overlap.
  template <int kCount>
  static FASTBERT_INLINE void forward_bf16(Vec (&x)[kCount]) {
    constexpr float kLargest = 12.8f, kRound = 12582912.0f;
    constexpr float kLogTail[] = {-4.911174045e-08f, 2.759975814e-06f,  -6.690848386e-05f,
                                  9.306520224e-04f,  -8.403988555e-03f, 5.358185619e-02f,
                                  4.589840174e-01f,  1.150994420e+00f,  1.000019312e+00f};
    constexpr float kPower[] = {5.517133915e-02f, 2.426111662e-01f, 6.932610321e-01f,
                                9.999280724e-01f};
    Vec a[kCount], log[kCount], shifted[kCount], r[kCount], power[kCount];
    for (int i = 0; i < kCount; ++i) {
      a[i] = least(abs(x[i]), splat(kLargest));
      log[i] = splat(kLogTail[0]);
      power[i] = splat(kPower[0]);
    }
#pragma GCC unroll 8
    for (int k = 1; k <= 8; ++k) {
      for (int i = 0; i < kCount; ++i) log[i] = fma(log[i], a[i], splat(kLogTail[k]));
    }
    // The low bits of `shifted` are an integer, as in exp_negative (exp.h), and r is the remainder
    // of -log.
    for (int i = 0; i < kCount; ++i) shifted[i] = kRound - log[i];
    for (int i = 0; i < kCount; ++i) r[i] = (kRound - shifted[i]) - log[i];
#pragma GCC unroll 3
    for (int k = 1; k <= 3; ++k) {
      for (int i = 0; i < kCount; ++i) power[i] = fma(power[i], r[i], splat(kPower[k]));
    }
    for (int i = 0; i < kCount; ++i) {
      const Vec tail = (Vec)((IntVec)power[i] + ((IntVec)shifted[i] << 23));
      x[i] = fma(-a[i], tail, greatest(Vec{}, x[i]));
    }
  }

  // The slope is Phi(x) + x phi(x), where phi is the density of the normal distribution. Where phi
  // is 0, the product is skipped, because x may be infinite.
  static FASTBERT_INLINE Vec both(Vec x, Vec& slope) {
    Vec bell;
    const Vec cumulative = distribution(x, bell);
    const Vec sum = fma(x * tail::kDensityAtZero, bell, cumulative);
    slope = select(abs(x) > 14.0f, cumulative, sum);
    return x * cumulative;
  }
};

// Returns the logistic function s(x) and sets `complement` to s(-x), where e must be exp(-|x|).
// Neither value is computed as a difference, so both have a small relative error.
FASTBERT_INLINE Vec logistic(Vec x, Vec e, Vec& complement) {
  const Vec larger = 1.0f / (1.0f + e);
  const Vec smaller = e * larger;
  complement = select(x > 0.0f, smaller, larger);
  return select(x > 0.0f, larger, smaller);
}

struct GeluTanh {
  static constexpr float kTwoBeta = 1.5957691216f;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0.044715f;

  // Returns s(2 w) and sets `complement` to s(-2 w) for w = sqrt(2 / pi) (x + 0.044715 x^3).
  static FASTBERT_INLINE Vec of_cubic(Vec x, Vec& complement) {
    const Vec inner = fma(x * x, splat(kCubic), splat(1.0f));
    return logistic(x, exp_negative(abs(x) * kTwoBeta * inner), complement);
  }

  static FASTBERT_INLINE Vec forward(Vec x) {
    Vec complement;
    return x * of_cubic(x, complement);
  }

  // The slope is s + x s (1 - s) 2 w' with s = s(2 w), where w' is the derivative of w. For |x| >
  // 12, the second term is skipped: its value is 0, but x^2 may overflow.
  static FASTBERT_INLINE Vec both(Vec x, Vec& slope) {
    Vec complement;
    const Vec s = of_cubic(x, complement);
    const Vec inner = kTwoBeta * fma(x * x, splat(3.0f * kCubic), splat(1.0f));
    slope = select(abs(x) > 12.0f, s, fma(x * inner, s * complement, s));
    return x * s;
  }
};

// max(x, 0). NaN stays NaN, and the slope at NaN is 1, as in torch.
struct Relu {
  static FASTBERT_INLINE Vec forward(Vec x) { return select(x <= 0.0f, Vec{}, x); }

  static FASTBERT_INLINE Vec both(Vec x, Vec& slope) {
    slope = select(x <= 0.0f, Vec{}, splat(1.0f));
    return forward(x);
  }
};

// x s(x) with the logistic function s (Elfwing et al. 2018).
struct Silu {
  static FASTBERT_INLINE Vec forward(Vec x) {
    Vec complement;
    return x * logistic(x, exp_negative(abs(x)), complement);
  }

  // The slope is s + x s (1 - s). For |x| > 87, the second term is skipped: its value is 0, but x
  // may be infinite.
  static FASTBERT_INLINE Vec both(Vec x, Vec& slope) {
    Vec complement;
    const Vec s = logistic(x, exp_negative(abs(x)), complement);
    slope = select(abs(x) > 87.0f, s, fma(x * s, complement, s));
    return x * s;
  }
};

}  // namespace fastbert::cpu::FASTBERT_LEVEL
