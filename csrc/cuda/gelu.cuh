// GELU and its derivative for one element (Hendrycks and Gimpel 2016), by the formulas of
// cpu/rows/activation.h.

#pragma once

#include "../normal_tail.h"
#include "softmax.cuh"

namespace fastbert::cuda {

// The arithmetic for results in fp32. `mills` evaluates the polynomial P of normal_tail.h.
struct FullPrecision {
  static constexpr bool kTakesInfinity = true;
  static __device__ float inverse(float x) { return 1.0f / x; }
  // Returns exp(factor * x).
  static __device__ float power(float x, float factor) { return expf(factor * x); }
  static __device__ float mills(float t) {
    constexpr float kPolynomial[] = FASTBERT_NORMAL_TAIL_POLYNOMIAL;
    float p = kPolynomial[0];
#pragma unroll
    for (int i = 1; i <= fastbert::normal_tail::kDegree; ++i) p = fmaf(p, t, kPolynomial[i]);
    return p;
  }
};

// The arithmetic for results in 16 bits. `mills` evaluates a shorter minimax polynomial with a
// relative error of 3.1e-6, which is an eightieth of half a unit in the last place of fp16. The
// derivative at an infinite number is NaN, as in PyTorch.
struct HalfPrecision {
  static constexpr bool kTakesInfinity = false;
  static __device__ float inverse(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
  static __device__ float power(float x, float factor) { return exp2_fast(x * (factor * kLog2E)); }
  static __device__ float mills(float t) {
    float p = -4.705473315e-03f;
    p = fmaf(p, t, -6.729082204e-03f);
    p = fmaf(p, t, 6.110807881e-02f);
    p = fmaf(p, t, -1.866630465e-01f);
    p = fmaf(p, t, 3.870366514e-01f);
    p = fmaf(p, t, -6.078874469e-01f);
    return fmaf(p, t, 7.552870512e-01f);
  }
};

template <class Arithmetic>
struct GeluBy {
  // Returns Phi(x), the distribution function of the standard normal distribution, and sets `bell`
  // to exp(-x^2 / 2).
  static __device__ float distribution(float x, float& bell) {
    namespace tail = fastbert::normal_tail;
    const float a = fabsf(x);
    const float r = Arithmetic::inverse(a + tail::kShift);
    const float t = fmaf(r, tail::kSlope, 1.0f);
    bell = Arithmetic::power(a * a, -0.5f);
    const float q = bell * (Arithmetic::mills(t) * r);
    return x > 0.0f ? 1.0f - q : q;
  }

  static __device__ float forward(float x) {
    float bell;
    return x * distribution(x, bell);
  }

  // Returns Phi(x) + x phi(x), where phi is the density of the standard normal distribution. For
  // |x| > 14, the product is negligible, and FullPrecision leaves it out, because x may be
  // infinite.
  static __device__ float derivative(float x) {
    float bell;
    const float cumulative = distribution(x, bell);
    const float slope = fmaf(x * fastbert::normal_tail::kDensityAtZero, bell, cumulative);
    return Arithmetic::kTakesInfinity && fabsf(x) > 14.0f ? cumulative : slope;
  }
};

template <class Arithmetic>
struct GeluTanhBy {
  static constexpr float kTwoBeta = 1.5957691216f;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0.044715f;

  // Returns s(2 w) and sets `complement` to s(-2 w): s is the logistic function and
  // w = sqrt(2 / pi) (x + 0.044715 x^3).
  static __device__ float logistic(float x, float& complement) {
    const float e = Arithmetic::power(fabsf(x) * fmaf(x * x, kCubic, 1.0f), -kTwoBeta);
    const float larger = Arithmetic::inverse(1.0f + e), smaller = e * larger;
    complement = x > 0.0f ? smaller : larger;
    return x > 0.0f ? larger : smaller;
  }

  static __device__ float forward(float x) {
    float complement;
    return x * logistic(x, complement);
  }

  // Returns s + x s (1 - s) 2 w', where s = s(2 w) as in `logistic` and w' is the derivative of w.
  // For |x| > 12, the function returns s, because the second term is 0 and x^2 may overflow.
  static __device__ float derivative(float x) {
    float complement;
    const float s = logistic(x, complement);
    const float slope = kTwoBeta * fmaf(x * x, 3.0f * kCubic, 1.0f);
    return fabsf(x) > 12.0f ? s : fmaf(x * slope, s * complement, s);
  }
};

using Gelu = GeluBy<FullPrecision>;
using GeluTanh = GeluTanhBy<FullPrecision>;

}  // namespace fastbert::cuda
