// Pairs of neighbouring bf16 in 32-bit words, with the first element in the low half. The bf16 dot
// products of AVX-512 and AMX tiles read their operands in this form (VDPBF16PS and TDPBF16PS in
// Intel's Software Developer's Manual). Products advance along k, the dimension that they sum over,
// in steps of kStep elements.

#pragma once

#include "formats.h"
#include "transpose.h"
#if defined(FASTBERT_LEVEL_MATRICES)
#include "matrix_dots.h"
#endif

namespace fastbert::cpu::FASTBERT_LEVEL {

constexpr int kLine = 2 * kLanes;  // bf16 elements in a register

FASTBERT_INLINE int clamp_count(int64_t count, int most) {
  return count < 0 ? 0 : count < most ? (int)count : most;
}

// Loads `count` elements that are `stride` elements apart, starting at `p`. The other lanes of the
// result are 0.
template <class Format>
FASTBERT_INLINE Vec gather(const typename Format::Storage* p, int64_t stride, int count) {
  if (stride == 1) return Format::load(p, count);
  typename Format::Storage lanes[kLanes] = {};
  for (int i = 0; i < count; ++i) lanes[i] = p[i * stride];
  return Format::load(lanes, kLanes);
}

FASTBERT_INLINE WordVec bits_of(HalfVec v) {
#if defined(FASTBERT_LEVEL_NEON)
  return vmovl_u16((uint16x4_t)v);
#else
  return __builtin_convertvector(v, WordVec);
#endif
}

template <class>
constexpr bool kIsBF16 = false;
template <>
constexpr bool kIsBF16<BF16> = true;

// Rounds two registers to bf16, with the elements of `low` before those of `high`. Subnormals may
// become 0, as in narrow_normal; the products of bf16 pairs read subnormal operands as 0 too.
FASTBERT_INLINE Vec narrow_both(Vec low, Vec high) {
  Vec line;
#if FASTBERT_INTRINSIC_BYTES == 64 && \
    (defined(FASTBERT_LEVEL_DOTS) || defined(FASTBERT_LEVEL_TILES))
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  __builtin_memcpy(&line, &both, sizeof(line));
#else
  const HalfVec halves[] = {narrow_normal(low), narrow_normal(high)};
  __builtin_memcpy(&line, halves, sizeof(line));
#endif
  return line;
}

// Loads `depth` elements, at most kLine, and returns a register that holds them as bf16 in memory
// order. The other elements of the register are 0.
template <class From>
FASTBERT_INLINE Vec load_line(const typename From::Storage* p, int depth) {
  Vec line = {};
  if constexpr (kIsBF16<From>) {
    if (depth == kLine) return load((const float*)p);
    __builtin_memcpy(&line, p, 2 * depth);
  } else {
    const int rest = clamp_count(depth - kLanes, kLanes);
    line = narrow_both(From::load(p, clamp_count(depth, kLanes)),
                       rest > 0 ? From::load(p + kLanes, rest) : Vec{});
  }
  return line;
}

template <class From>
FASTBERT_INLINE Vec pair_words(Vec even, Vec odd) {
  if constexpr (kIsBF16<From>) {
    return (Vec)((WordVec)even >> 16 | ((WordVec)odd & 0xffff0000u));
  } else {
    return (Vec)(bits_of(BF16::narrow(even)) | bits_of(BF16::narrow(odd)) << 16);
  }
}

// Loads `rows` rows (at most kLanes) of `depth` elements (at most kLine), starting at `p`. `row` is
// the stride in elements from one row to the next, and `column` is the stride from one element of a
// row to the next. Word i of words[j] receives elements 2 j and 2 j + 1 of row i. Words without
// elements are 0.
template <class From>
FASTBERT_INLINE void load_pairs(const typename From::Storage* p, int64_t row, int64_t column,
                                int rows, int depth, Vec (&words)[kLanes]) {
  if (column == 1) {
    for (int i = 0; i < kLanes; ++i) {
      words[i] = i < rows ? load_line<From>(p + i * row, depth) : Vec{};
    }
    return transpose(words);
  }
  for (int j = 0; j < kLanes; ++j) {
    const auto* pair = p + 2 * j * column;
    const Vec even = gather<From>(pair, row, 2 * j < depth ? rows : 0);
    const Vec odd = gather<From>(pair + column, row, 2 * j + 1 < depth ? rows : 0);
    words[j] = pair_words<From>(even, odd);
  }
}

// Loads the same elements as load_pairs, without the transposition: words[i] receives the first
// `depth` elements of row i. Words without elements are 0.
template <class From>
FASTBERT_INLINE void load_row_pairs(const typename From::Storage* p, int64_t row, int64_t column,
                                    int rows, int depth, Vec (&words)[kLanes]) {
  if (column != 1) {
    load_pairs<From>(p, row, column, rows, depth, words);
    return transpose(words);
  }
  for (int i = 0; i < kLanes; ++i) {
    words[i] = i < rows ? load_line<From>(p + i * row, depth) : Vec{};
  }
}

constexpr int64_t kStep = kLine;                  // elements along k in a register of pairs
constexpr int64_t kStepBytes = kBytes;            // bytes of a row in one step
constexpr int64_t kWeightTile = kLanes * kBytes;  // bytes of a tile
constexpr int64_t kPanelStep = 2 * kWeightTile;   // bytes of a panel in one step
constexpr int64_t kStrip = kPanel;                // rows in a block of sums, as relative.h needs

FASTBERT_INLINE int64_t steps_of(int64_t k) { return (k + kStep - 1) / kStep; }
FASTBERT_INLINE int64_t whole_strips(int64_t rows) { return (rows + kStrip - 1) / kStrip * kStrip; }

// Packs one panel of a right operand: up to kPanel columns of k elements. A column of the operand
// is a row of a matrix in memory. `row` is the stride in elements from one such row to the next,
// and `column` is the stride from one element of a row to the next.
template <class From>
void pack_steps(const typename From::Storage* p, int64_t row, int64_t column, int64_t columns,
                int64_t k, char* packed) {
  for (int64_t first = 0; first < k; first += kStep) {
    for (int half = 0; half < 2; ++half, packed += kWeightTile) {
      Vec words[kLanes];
#if defined(FASTBERT_LEVEL_MATRICES)
      const auto* from = p + half * kLanes * row + first * column;
      load_row_pairs<From>(from, row, column, clamp_count(columns - half * kLanes, kLanes),
                           clamp_count(k - first, kStep), words);
      float* to = (float*)(packed - half * kWeightTile) + 2 * half * kLanes;
      store(to, low_halves(words[0], words[1]));
      store(to + kLanes, low_halves(words[2], words[3]));
      store(to + 2 * kPanel, high_halves(words[0], words[1]));
      store(to + 2 * kPanel + kLanes, high_halves(words[2], words[3]));
#else
      load_pairs<From>(p + half * kLanes * row + first * column, row, column,
                       clamp_count(columns - half * kLanes, kLanes), clamp_count(k - first, kStep),
                       words);
      __builtin_memcpy(packed, words, kWeightTile);
#endif
    }
  }
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
