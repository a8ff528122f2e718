// Storage formats of activations: fp32, bf16 and fp16 in memory, fp32 in registers.
//
// Conversion to 16 bits rounds to nearest, ties to even, and keeps NaN as NaN. As in vec.h, a load
// sets the lanes from number `count` on to 0, and a store does not write these lanes.

#pragma once

#include "kernels.h"
#include "vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

struct F32 {
  using Storage = float;
  static FASTBERT_INLINE Vec load(const Storage* p, int count) {
    return FASTBERT_LEVEL::load(p, count);
  }
  static FASTBERT_INLINE void store(Storage* p, Vec v, int count) {
    FASTBERT_LEVEL::store(p, v, count);
  }
};

FASTBERT_INLINE HalfVec load_half(const uint16_t* p, int count) {
  HalfVec bits = {};
  if (count == kLanes) {
    __builtin_memcpy(&bits, p, sizeof(bits));
    return bits;
  }
#if FASTBERT_INTRINSIC_BYTES == 64
  return (HalfVec)_mm256_maskz_loadu_epi16(lane_mask(count), p);
#else
  for (int i = 0; i < count; ++i) bits[i] = p[i];
  return bits;
#endif
}

FASTBERT_INLINE void store_half(uint16_t* p, HalfVec bits, int count) {
  if (count == kLanes) {
    __builtin_memcpy(p, &bits, sizeof(bits));
    return;
  }
#if FASTBERT_INTRINSIC_BYTES == 64
  _mm256_mask_storeu_epi16(p, lane_mask(count), (__m256i)bits);
#else
  for (int i = 0; i < count; ++i) p[i] = bits[i];
#endif
}

// The operations that bf16 and fp16 share. The class `Derived` defines `widen` and `narrow`.
template <class Derived>
struct SixteenBits {
  using Storage = uint16_t;
  static FASTBERT_INLINE Vec load(const Storage* p, int count) {
    return Derived::widen(load_half(p, count));
  }
  static FASTBERT_INLINE void store(Storage* p, Vec v, int count) {
    store_half(p, Derived::narrow(v), count);
  }
};

FASTBERT_INLINE WordVec choose(IntVec condition, WordVec a, WordVec b) { return condition ? a : b; }

struct BF16 : SixteenBits<BF16> {
  static FASTBERT_INLINE Vec widen(HalfVec bits) {
#if FASTBERT_INTRINSIC_BYTES == 64
    const WordVec words = (WordVec)_mm512_cvtepu16_epi32((__m256i)bits);
#elif FASTBERT_INTRINSIC_BYTES == 32
    // This intrinsic is one instruction. GCC compiles the equal __builtin_convertvector to four
    // instructions.
    const WordVec words = (WordVec)_mm256_cvtepu16_epi32((__m128i)bits);
#elif defined(FASTBERT_LEVEL_NEON)
    const WordVec words = vmovl_u16((uint16x4_t)bits);  // for the same reason
#else
    const WordVec words = __builtin_convertvector(bits, WordVec);
#endif
    return (Vec)(words << 16);
  }
  static FASTBERT_INLINE HalfVec narrow(Vec v) {
    const WordVec bits = (WordVec)v;
    const WordVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const WordVec quiet_nan = (bits >> 16) | 0x40u;
    return __builtin_convertvector(choose((IntVec)(v != v), quiet_nan, rounded), HalfVec);
  }
};

struct F16 : SixteenBits<F16> {
#if FASTBERT_INTRINSIC_BYTES == 64
  static FASTBERT_INLINE Vec widen(HalfVec bits) { return (Vec)_mm512_cvtph_ps((__m256i)bits); }
  static FASTBERT_INLINE HalfVec narrow(Vec v) {
    return (HalfVec)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
#elif FASTBERT_INTRINSIC_BYTES == 32
  static FASTBERT_INLINE Vec widen(HalfVec bits) { return (Vec)_mm256_cvtph_ps((__m128i)bits); }
  static FASTBERT_INLINE HalfVec narrow(Vec v) {
    return (HalfVec)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
#elif defined(FASTBERT_LEVEL_NEON)
  static FASTBERT_INLINE Vec widen(HalfVec bits) { return vcvt_f32_f16((float16x4_t)bits); }
  static FASTBERT_INLINE HalfVec narrow(Vec v) { return (HalfVec)vcvt_f16_f32(v); }
#else
  // A multiplication by 2^112 changes the exponent bias from 15 to 127. The multiplication is exact
  // and also normalises subnormals.
  static FASTBERT_INLINE Vec widen(HalfVec bits) {
    const WordVec h = __builtin_convertvector(bits, WordVec);
    const WordVec finite = (WordVec)((Vec)((h & 0x7fffu) << 13) * 0x1p112f);
    const WordVec special = ((h & 0x7fffu) << 13) | 0x7f800000u;
    const WordVec magnitude = choose((IntVec)((h & 0x7c00u) == 0x7c00u), special, finite);
    return (Vec)(magnitude | (h & 0x8000u) << 16);
  }
  static FASTBERT_INLINE HalfVec narrow(Vec v) {
    const Vec magnitude = abs(v);
    const WordVec bits = (WordVec)magnitude;
    // The mantissa of a normal number is rounded from 23 to 10 bits, and the exponent bias changes
    // from 127 to 15.
    const WordVec normal = (bits + 0xfffu + ((bits >> 13) & 1u) - (112u << 23)) >> 13;
    // For a subnormal result, adding 0.5 rounds to a multiple of 2^-24. The low bits of the sum are
    // the result.
    const WordVec subnormal = (WordVec)(magnitude + 0.5f) - 0x3f000000u;
    WordVec result = choose((IntVec)(magnitude < 0x1p-14f), subnormal, normal);
    result = choose((IntVec)(magnitude >= 65520.0f), WordVec{} + 0x7c00u, result);
    result = choose((IntVec)(v != v), WordVec{} + 0x7e00u, result);
    return __builtin_convertvector(result | ((WordVec)v >> 16 & 0x8000u), HalfVec);
  }
#endif
};

// Converts numbers to bf16, with one instruction if the level has one: VCVTNEPS2BF16 of
// AVX512_BF16, which treats subnormals as 0, so results that are subnormal may differ between
// levels, or BFCVTN.
FASTBERT_INLINE HalfVec narrow_normal(Vec v) {
#if (defined(FASTBERT_LEVEL_DOTS) || defined(FASTBERT_LEVEL_TILES)) && \
    FASTBERT_INTRINSIC_BYTES == 64
  const __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
  HalfVec bits;
  __builtin_memcpy(&bits, &narrow, sizeof(bits));
  return bits;
#elif defined(FASTBERT_LEVEL_DOTS) && defined(FASTBERT_LEVEL_NEON)
  return (HalfVec)vcvt_bf16_f32(v);
#else
  return BF16::narrow(v);
#endif
}

// Calls body(type) with the C++ type of the format `format`.
template <class Body>
FASTBERT_INLINE void with_format(Format format, Body body) {
  switch (format) {
    case Format::f32:
      return body(F32{});
    case Format::bf16:
      return body(BF16{});
    case Format::f16:
      return body(F16{});
  }
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
