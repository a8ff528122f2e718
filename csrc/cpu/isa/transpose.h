// The transposition of a square block of registers by log2(kLanes) rounds of interleaving. The
// block stays in registers.

#pragma once

#include "vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// interleave_low returns a0 b0 a1 b1 ... from the elements in the lower halves of a and b.
// interleave_high does the same with the upper halves.
#if FASTBERT_LEVEL_BYTES == 64
FASTBERT_INLINE Vec interleave_low(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
FASTBERT_INLINE Vec interleave_high(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                 31);
}
#elif FASTBERT_LEVEL_BYTES == 32
FASTBERT_INLINE Vec interleave_low(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
FASTBERT_INLINE Vec interleave_high(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
#else
FASTBERT_INLINE Vec interleave_low(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, 0, 4, 1, 5);
}
FASTBERT_INLINE Vec interleave_high(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, 2, 6, 3, 7);
}
#endif

// Transposes a square block in place. One round interleaves rows i and i + kLanes / 2, which gives
// rows 2 i and 2 i + 1. The round rotates the bits of the combined index (row, lane) by one
// position, and log2(kLanes) rotations exchange row and lane.
FASTBERT_INLINE void transpose(Vec (&block)[kLanes]) {
#pragma GCC unroll 4
  for (int step = 1; step < kLanes; step *= 2) {
    Vec mixed[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; ++i) {
      mixed[2 * i] = interleave_low(block[i], block[i + kLanes / 2]);
      mixed[2 * i + 1] = interleave_high(block[i], block[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) block[i] = mixed[i];
  }
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
