// Philox4x32 with 7 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") for
// one register of counters at a time, and the dropout mask of one row.

#pragma once

#include "../isa/kernels.h"
#include "../isa/transpose.h"
#include "../isa/vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

constexpr int kPhiloxRounds = 7;

// Returns the 64-bit products of the even 32-bit lanes.
FASTBERT_INLINE WideVec multiply_even(WordVec a, WordVec b) {
#if FASTBERT_INTRINSIC_BYTES == 64
  return (WideVec)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif FASTBERT_INTRINSIC_BYTES == 32
  return (WideVec)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif FASTBERT_INTRINSIC_BYTES == 16 && defined(__x86_64__)
  return (WideVec)_mm_mul_epu32((__m128i)a, (__m128i)b);
#elif defined(FASTBERT_LEVEL_NEON)
  return vmull_u32(vmovn_u64((WideVec)a), vmovn_u64((WideVec)b));
#else
  return ((WideVec)a & 0xffffffffu) * ((WideVec)b & 0xffffffffu);
#endif
}

FASTBERT_INLINE void multiply(WordVec a, uint32_t factor, WordVec& high, WordVec& low) {
  constexpr uint64_t kLow = 0xffffffffu;
  const WordVec factors = WordVec{} + factor;
  const WideVec even = multiply_even(a, factors);
  const WideVec odd = multiply_even((WordVec)((WideVec)a >> 32), factors);
  low = (WordVec)((even & kLow) | (odd << 32));
  high = (WordVec)((even >> 32) | (odd & ~kLow));
}

FASTBERT_INLINE void philox(const uint32_t (&key)[2], WordVec (&counter)[4]) {
  uint32_t key0 = key[0], key1 = key[1];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    WordVec high0, low0, high1, low1;
    multiply(counter[0], 0xD2511F53u, high0, low0);
    multiply(counter[2], 0xCD9E8D57u, high1, low1);
    counter[0] = high1 ^ counter[1] ^ key0;
    counter[1] = low1;
    counter[2] = high0 ^ counter[3] ^ key1;
    counter[3] = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// Transposes the 4x4 blocks of words in four registers; a block consists of 128 bits of each
// register.
FASTBERT_INLINE void transpose_blocks(WordVec (&v)[4]) {
#if FASTBERT_INTRINSIC_BYTES == 64
#define FASTBERT_UNPACK(half, width, a, b) \
  (WordVec) _mm512_unpack##half##_epi##width((__m512i)a, (__m512i)b)
#elif FASTBERT_INTRINSIC_BYTES == 32
#define FASTBERT_UNPACK(half, width, a, b) \
  (WordVec) _mm256_unpack##half##_epi##width((__m256i)a, (__m256i)b)
#elif FASTBERT_INTRINSIC_BYTES == 16 && defined(__x86_64__)
#define FASTBERT_UNPACK(half, width, a, b) \
  (WordVec) _mm_unpack##half##_epi##width((__m128i)a, (__m128i)b)
#endif
#if defined(FASTBERT_UNPACK)
  const WordVec a = FASTBERT_UNPACK(lo, 32, v[0], v[1]), b = FASTBERT_UNPACK(hi, 32, v[0], v[1]);
  const WordVec c = FASTBERT_UNPACK(lo, 32, v[2], v[3]), d = FASTBERT_UNPACK(hi, 32, v[2], v[3]);
  v[0] = FASTBERT_UNPACK(lo, 64, a, c);
  v[1] = FASTBERT_UNPACK(hi, 64, a, c);
  v[2] = FASTBERT_UNPACK(lo, 64, b, d);
  v[3] = FASTBERT_UNPACK(hi, 64, b, d);
#undef FASTBERT_UNPACK
#elif FASTBERT_LEVEL_BYTES == 16
  Vec block[4];
  for (int i = 0; i < 4; ++i) block[i] = (Vec)v[i];
  transpose(block);
  for (int i = 0; i < 4; ++i) v[i] = (WordVec)block[i];
#else
  const WordVec old[4] = {v[0], v[1], v[2], v[3]};
  for (int i = 0; i < 4; ++i) {
    for (int lane = 0; lane < kLanes; ++lane) v[i][lane] = old[lane % 4][lane / 4 * 4 + i];
  }
#endif
}

// Returns the number of elements in the mask of a row: `columns`, rounded up to a multiple of 4 *
// kLanes.
FASTBERT_INLINE int64_t mask_length(int64_t columns) {
  return (columns + 4 * kLanes - 1) / (4 * kLanes) * (4 * kLanes);
}

// Sets mask[n] to all ones if element (row, n) is kept, and to 0 if it is dropped. The function is
// not inlined, because its constants would take registers from the caller even without dropout.
inline __attribute__((noinline)) void dropout_mask(const Dropout& dropout, int64_t row,
                                                   int64_t columns, uint32_t* mask) {
  // Each group of 4 * kLanes elements has kLanes counters. Before the transposition, lane 4 b + j
  // of a register holds counter j * (kLanes / 4) + b of the group. After the transposition,
  // register j therefore holds the words of kLanes / 4 consecutive counters in memory order.
  const WordVec lane = lane_numbers();
  const WordVec order = (lane & 3u) * (uint32_t)(kLanes / 4) + (lane >> 2);
  for (int64_t n = 0; n < columns; n += 4 * kLanes) {
    WordVec words[4] = {order + (uint32_t)(n / 4), WordVec{} + (uint32_t)row, WordVec{}, WordVec{}};
    philox(dropout.key, words);
    transpose_blocks(words);
    for (int j = 0; j < 4; ++j) {
      const IntVec kept = (IntVec)((words[j] >> 8) >= dropout.threshold);
      __builtin_memcpy(mask + n + j * kLanes, &kept, kBytes);
    }
  }
}

// Returns `scale` times the elements of x that `mask` keeps, and 0 for the other elements. A
// dropped element is exactly 0 even if x is infinite or NaN.
FASTBERT_INLINE Vec drop(Vec x, const uint32_t* mask, float scale, int count) {
  WordVec kept = {};
  if (count == kLanes) {
    __builtin_memcpy(&kept, mask, kBytes);
  } else {
    for (int i = 0; i < count; ++i) kept[i] = mask[i];
  }
  return (Vec)((WordVec)(x * scale) & kept);
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
