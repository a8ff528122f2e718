// GELU and its derivative for one element (Hendrycks and Gimpel 2016), by the formulas of
// cpu/rows/activation.h.

#pragma once

#include "../normal_tail.h"

namespace fastbert::cuda {

struct Gelu {
  // Returns Phi(x) and sets `bell` to exp(-x^2 / 2).
  static __device__ float distribution(float x, float& bell) {
    namespace tail = fastbert::normal_tail;
    const float a = fabsf(x);
    const float r = 1.0f / (a + tail::kShift);
    const float t = fmaf(r, tail::kSlope, 1.0f);
    constexpr float kPolynomial[] = FASTBERT_NORMAL_TAIL_POLYNOMIAL;
    float p = kPolynomial[0];
#pragma unroll
    for (int i = 1; i <= tail::kDegree; ++i) p = fmaf(p, t, kPolynomial[i]);
    bell = expf(-0.5f * a * a);
    const float q = bell * (p * r);
    return x > 0.0f ? 1.0f - q : q;
  }

  static __device__ float forward(float x) {
    float bell;
    return x * distribution(x, bell);
  }

  // Returns Phi(x) + x phi(x). Where phi is 0, the product is left out, because x may be infinite.
  static __device__ float derivative(float x) {
    float bell;
    const float cumulative = distribution(x, bell);
    const float slope = fmaf(x * fastbert::normal_tail::kDensityAtZero, bell, cumulative);
    return fabsf(x) > 14.0f ? cumulative : slope;
  }
};

struct GeluTanh {
  static constexpr float kTwoBeta = 1.5957691216f;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0.044715f;

  // Returns s(2 w) and sets `complement` to s(-2 w): s is the logistic function and
  // w = sqrt(2 / pi) (x + 0.044715 x^3).
  static __device__ float logistic(float x, float& complement) {
    const float e = expf(-fabsf(x) * kTwoBeta * fmaf(x * x, kCubic, 1.0f));
    const float larger = 1.0f / (1.0f + e), smaller = e * larger;
    complement = x > 0.0f ? smaller : larger;
    return x > 0.0f ? larger : smaller;
  }

  static __device__ float forward(float x) {
    float complement;
    return x * logistic(x, complement);
  }

  // Returns s + x s (1 - s) 2 w'. Above |x| = 12, the second term is 0, and x^2 may overflow.
  static __device__ float derivative(float x) {
    float complement;
    const float s = logistic(x, complement);
    const float slope = kTwoBeta * fmaf(x * x, 3.0f * kCubic, 1.0f);
    return fabsf(x) > 12.0f ? s : fmaf(x * slope, s * complement, s);
  }
};

}  // namespace fastbert::cuda
