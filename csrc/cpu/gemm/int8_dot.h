// The arithmetic of int8 products: each 32-bit lane receives an exact dot product of two, four or
// eight consecutive elements along k, with sums in int32 (Intel's Software Developer's Manual, and
// the Arm Architecture Reference Manual).
//
// The usual AVX2 instruction for this product, pmaddubsw, saturates the sum of two products at 16
// bits. The sum of two products of an activation up to 255 and a weight up to 127 exceeds this
// limit. Levels without AVX512_VNNI therefore widen both operands to 16 bits and use pmaddwd, which
// cannot overflow here, or on ARM smull and addp. Weights are widened when they are loaded, and
// activations when they are quantised. vpdpbusd, AMX tiles and usmmla multiply unsigned by signed
// bytes directly.

#pragma once

#include "../isa/vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

typedef int16_t ShortVec __attribute__((vector_size(kBytes)));
typedef int8_t NarrowVec __attribute__((vector_size(kBytes / 2)));

// The size of groups of bytes, at a level that has products of bytes.
#if defined(FASTBERT_LEVEL_I8MM)
constexpr int64_t kByteGroup = 8;
#else
constexpr int64_t kByteGroup = 4;
#endif

// Returns a register with the 4 bytes at `p` in every lane.
FASTBERT_INLINE IntVec splat_word(const void* p) {
  int32_t word;
  __builtin_memcpy(&word, p, sizeof(word));
  return word - IntVec{};
}

// Multiplies two int16 activations by two weights in each lane.
struct Pairs {
  using Element = int16_t;
  static constexpr int kGroup = 2;

  static FASTBERT_INLINE IntVec weights(const int8_t* p) {
#if FASTBERT_INTRINSIC_BYTES == 64
    return (IntVec)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#elif FASTBERT_INTRINSIC_BYTES == 32
    // GCC 12 compiles __builtin_convertvector to five instructions instead of one.
    return (IntVec)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#elif defined(FASTBERT_LEVEL_NEON)
    return (IntVec)vmovl_s8(vld1_s8(p));
#else
    NarrowVec narrow;
    __builtin_memcpy(&narrow, p, sizeof(narrow));
    return (IntVec) __builtin_convertvector(narrow, ShortVec);
#endif
  }

  static FASTBERT_INLINE IntVec multiply_add(IntVec x, IntVec w, IntVec sum) {
#if FASTBERT_INTRINSIC_BYTES == 64
    return sum + (IntVec)_mm512_madd_epi16((__m512i)x, (__m512i)w);
#elif FASTBERT_INTRINSIC_BYTES == 32
    return sum + (IntVec)_mm256_madd_epi16((__m256i)x, (__m256i)w);
#elif FASTBERT_INTRINSIC_BYTES == 16 && defined(__x86_64__)
    return sum + (IntVec)_mm_madd_epi16((__m128i)x, (__m128i)w);
#elif defined(FASTBERT_LEVEL_NEON)
    const int16x8_t a = (int16x8_t)x, b = (int16x8_t)w;
    const int32x4_t low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
    return sum + (IntVec)vpaddq_s32(low, vmull_high_s16(a, b));
#else
    return sum + (x << 16 >> 16) * (w << 16 >> 16) + (x >> 16) * (w >> 16);
#endif
  }
};

#if FASTBERT_LEVEL_BYTES == 64
FASTBERT_INLINE bool has_quads() {
#if defined(FASTBERT_EMULATE)
  return true;
#else
  return __builtin_cpu_supports("avx512vnni");
#endif
}

// Multiplies four unsigned activations by four signed weights in each lane.
struct Quads {
  using Element = uint8_t;
  static constexpr int kGroup = 4;

  static FASTBERT_INLINE IntVec weights(const int8_t* p) {
    IntVec v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }

  static FASTBERT_INLINE IntVec multiply_add(IntVec x, IntVec w, IntVec sum) {
#if defined(FASTBERT_EMULATE)
    for (int shift = 0; shift < 32; shift += 8) {
      sum += (x >> shift & 0xff) * (w << (24 - shift) >> 24);
    }
#else
    // The instruction is written in assembly, because the level avx512 is also compiled for
    // processors without it.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
#endif
    return sum;
  }
};
#endif

#if defined(FASTBERT_LEVEL_I8MM)
// Multiplies unsigned activations by signed weights, two rows by two columns with eight elements
// each in one instruction.
struct Octets {
  using Element = uint8_t;
  static constexpr int kGroup = 8;

  // `x` has two rows, `w` has two columns, and `sum` has the four sums, one row after the other.
  // The instruction is written in assembly for the same reason as BFMMLA (isa/matrix_dots.h).
  static FASTBERT_INLINE int32x4_t multiply_add(uint8x16_t x, int8x16_t w, int32x4_t sum) {
    asm("usmmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(x), "w"(w));
    return sum;
  }
};
#endif

}  // namespace fastbert::cpu::FASTBERT_LEVEL
