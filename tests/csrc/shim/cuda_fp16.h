// fp16 as bits, converted with round to nearest even.

#pragma once

#include <cmath>
#include <cstdint>

struct __half {
  uint16_t bits;
};

inline float __half2float(__half x) {
  const int exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
  const float sign = x.bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
}

inline __half __float2half_rn(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float magnitude = std::fabs(x);
  if (x != x) return {0x7fff};
  if (magnitude >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
  int exponent = -14;
  if (magnitude >= 0x1p-14f) exponent = std::ilogb(magnitude);
  // In units of the last place; nearbyint rounds ties to even, and a carry moves into the exponent.
  const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  const int biased = (exponent + 14) * 1024 + units;
  return {static_cast<uint16_t>(sign | biased)};
}
