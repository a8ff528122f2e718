// The arithmetic of int8 products: each 32-bit lane receives an exact dot product of two or four
// consecutive elements along k, with sums in int32 (Intel's Software Developer's Manual).
//
// The usual AVX2 instruction for this product, pmaddubsw, saturates the sum of two products at 16
// bits. The sum of two products of an activation up to 255 and a weight up to 127 exceeds this
// limit. Levels without AVX512_VNNI therefore widen both operands to 16 bits and use pmaddwd, which
// cannot overflow here. Weights are widened when they are loaded, and activations when they are
// quantised. vpdpbusd and AMX tiles multiply unsigned by signed bytes directly.

#pragma once

#include "../isa/vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

typedef int16_t ShortVec __attribute__((vector_size(kBytes)));
typedef int8_t NarrowVec __attribute__((vector_size(kBytes / 2)));

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

}  // namespace fastbert::cpu::FASTBERT_LEVEL
