// int8 products. The operator int8_linear quantises the rows of its argument x in each call;
// weights are quantised once, in advance. Sums are int32 and are converted back to fp32 with one
// scale for each row and one for each column (Jacob et al. 2018).
//
// Let [low, high] be the smallest interval that contains all elements of a row and 0. The row
// becomes q = clip(rint(x / scale) + zero, 0, 255) with scale = (high - low) / 255 and zero =
// rint(-low / scale). Activations are quantised with a zero point, because the result of a GELU is
// hardly ever below 0 and would waste half of a symmetric range. Weights are quantised
// symmetrically. Because of the zero point, zero times the sum of a column of weights must be
// subtracted from each result in this column. With 16-bit activations, q - zero is stored instead
// of q, and the subtraction is not needed. Integer sums do not depend on their order, so every
// level, block and batch gives the same sums.
//
// A prepacked weight consists of panels of kLanes columns. Each panel is [k /
// group][kLanes][group], with a group of 2, 4 or 8 (int8_dot.h). Zeros pad k to a multiple of 64
// and the number of panels to a multiple of 4.

#pragma once

#include "../isa/formats.h"
#include "../isa/kernels.h"
#include "../isa/vec.h"
#include "epilogue.h"
#include "int8_dot.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// Adding kRounder = 1.5 * 2^23 to a float rounds the float to an integer, ties to even. The low
// bits of the sum's mantissa are this integer.
constexpr float kRounder = 12582912.0f;
constexpr int32_t kRounderBits = 0x4b400000;

// Below this scale, the reciprocal of the scale could overflow, so the row is quantised as a row of
// zeros.
constexpr float kSmallestScale = 0x1p-120f;

struct RowRange {
  float low, high;
  bool finite;
};

// Returns the smallest interval that contains all elements of a row and 0, and whether all elements
// are finite. Several chains of comparisons run at a time, because each comparison of a single
// chain would wait for the previous comparison.
template <class Format>
FASTBERT_INLINE RowRange range_of(const typename Format::Storage* x, int64_t columns) {
  Vec lows[kSums] = {}, highs[kSums] = {};
  IntVec bits = {};
  for_each_summand(columns, [&](int64_t n, int u, int count) __attribute__((always_inline)) {
    const Vec v = Format::load(x + n, count);
    lows[u] = select(v < lows[u], v, lows[u]);
    highs[u] = select(v > highs[u], v, highs[u]);
    const IntVec magnitude = (IntVec)v & 0x7fffffff;
    bits = magnitude > bits ? magnitude : bits;
  });
  Vec low = lows[0], high = highs[0];
  for (int u = 1; u < kSums; ++u) {
    low = select(lows[u] < low, lows[u], low);
    high = select(highs[u] > high, highs[u], high);
  }
  RowRange range = {0.0f, 0.0f, true};
  for (int i = 0; i < kLanes; ++i) {
    if (low[i] < range.low) range.low = low[i];
    if (high[i] > range.high) range.high = high[i];
    if (bits[i] >= 0x7f800000) range.finite = false;
  }
  return range;
}

FASTBERT_INLINE void store_narrow(uint8_t* p, IntVec v, int count) {
  typedef uint8_t ByteVec __attribute__((vector_size(kLanes)));
#if defined(FASTBERT_LEVEL_NEON)
  // GCC 12 converts each lane by itself.
  const uint16x4_t shorts = vmovn_u32((uint32x4_t)v);
  const uint8x8_t twice = vmovn_u16(vcombine_u16(shorts, shorts));
  ByteVec bytes;
  __builtin_memcpy(&bytes, &twice, sizeof(bytes));
#else
  const ByteVec bytes = __builtin_convertvector(v, ByteVec);
#endif
  if (count == kLanes) {
    __builtin_memcpy(p, &bytes, sizeof(bytes));
  } else {
    for (int i = 0; i < count; ++i) p[i] = bytes[i];
  }
}

FASTBERT_INLINE void store_narrow(int16_t* p, IntVec v, int count) {
  typedef int16_t HalfShortVec __attribute__((vector_size(kBytes / 2)));
  const HalfShortVec shorts = __builtin_convertvector(v, HalfShortVec);
  if (count == kLanes) {
    __builtin_memcpy(p, &shorts, sizeof(shorts));
  } else {
    for (int i = 0; i < count; ++i) p[i] = shorts[i];
  }
}

// Quantises the rows [begin, end) of x. With the type uint8_t as `Element`, q is stored; with
// int16_t, q - zero is stored. A row with an infinite or NaN element gets the scale NaN, so all
// results of the row are NaN.
template <class Format, class Element>
void int8_quantise_rows(const Int8Rows& params, int64_t begin, int64_t end) {
  const Int8Rows p = params;
  constexpr bool kOffset = sizeof(Element) == 1;
  for (int64_t row = begin; row < end; ++row) {
    const auto* x = (const typename Format::Storage*)p.x.data + row * p.x.stride;
    Element* q = (Element*)p.q + row * p.depth;
    const RowRange range = range_of<Format>(x, p.columns);
    const float scale = range.high / 255.0f - range.low / 255.0f;
    const bool empty = !range.finite || !(scale >= kSmallestScale);
    p.scale[row] = !range.finite ? __builtin_nanf("") : empty ? 0.0f : scale;
    p.zero[row] = 0;
    __builtin_memset(q, 0, p.depth * sizeof(Element));
    if (empty) continue;
    const float inverse = 1.0f / scale;
    const int32_t zero = (int32_t)(-range.low * inverse + kRounder - kRounder);
    if (kOffset) p.zero[row] = zero;
    const IntVec lowest = IntVec{} + (kOffset ? 0 : -zero), highest = lowest + 255;
    const int32_t shift = kRounderBits - (kOffset ? zero : 0);
    for_each_vector(p.columns, [&](int64_t n, int count) __attribute__((always_inline)) {
      const Vec scaled = Format::load(x + n, count) * inverse;
      IntVec v = (IntVec)(scaled + kRounder) - shift;
      v = v < lowest ? lowest : v;
      v = v > highest ? highest : v;
      store_narrow(q + n, v, count);
    });
  }
}

template <class Element>
FASTBERT_INLINE void int8_quantise_elements(const Int8Rows& p, int64_t begin, int64_t end) {
  switch (p.format) {
    case Format::f32:
      return int8_quantise_rows<F32, Element>(p, begin, end);
    case Format::bf16:
      return int8_quantise_rows<BF16, Element>(p, begin, end);
    case Format::f16:
      return int8_quantise_rows<F16, Element>(p, begin, end);
  }
}

void int8_quantise(const Int8Rows& p, int64_t begin, int64_t end) {
  if (p.group == kByteGroup) return int8_quantise_elements<uint8_t>(p, begin, end);
  int8_quantise_elements<int16_t>(p, begin, end);
}

// A register block has up to kInt8Rows rows and kInt8Panels panels. With at most kInt8FewRows rows,
// a block has kInt8MostPanels panels, so that there are enough independent sums to hide the latency
// of the instructions.
constexpr int kInt8Rows = 6;
constexpr int kInt8Panels = FASTBERT_LEVEL_BYTES == 64 ? 4 : 2;
constexpr int kInt8FewRows = 2;
constexpr int kInt8MostPanels = 4;

// Computes sums[r][p * kLanes + i] for kRows rows of q and the columns of kPanels panels. Products
// with groups of four and more than kInt8FewRows rows would wait for memory, so they prefetch the
// panel at `next` into the second-level cache.
template <class Dot, int kRows, int kPanels>
__attribute__((noinline)) void int8_block(const void* rows, int64_t depth, const int8_t* packed,
                                          const int8_t* next, int32_t* sums) {
  const auto* q = (const typename Dot::Element*)rows;
  const int64_t panel = depth * kLanes;
  constexpr bool kFetch = Dot::kGroup == 4 && kRows > kInt8FewRows;
  IntVec total[kRows][kPanels] = {};
  for (int64_t k = 0; k < depth; k += Dot::kGroup) {
    if (kFetch) __builtin_prefetch(next + k * kLanes, 0, 2);
    IntVec w[kPanels];
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) w[p] = Dot::weights(packed + p * panel + k * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const IntVec x = splat_word(q + r * depth + k);
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) total[r][p] = Dot::multiply_add(x, w[p], total[r][p]);
    }
  }
  // All loops over `total` are unrolled, so that GCC keeps `total` in registers. Otherwise it would
  // fill the array with zeros in memory and copy it, which takes about as long as a tenth of a
  // product with 384 terms.
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      __builtin_memcpy(sums + (r * kPanels + p) * kLanes, &total[r][p], kBytes);
    }
  }
}

#if defined(FASTBERT_LEVEL_I8MM)
// Computes the same block with groups of eight. Sixteen elements of two rows are loaded at once,
// and their halves are joined to two operands. The last row of an odd number of rows is multiplied
// twice.
template <int kRows, int kPanels>
__attribute__((noinline)) void int8_octets(const uint8_t* q, int64_t depth, const int8_t* packed,
                                           const int8_t* next, int32_t* sums) {
  constexpr int kRowPairs = (kRows + 1) / 2, kColumnPairs = kPanels * kLanes / 2;
  const int64_t panel = depth * kLanes;
  int32x4_t total[kRowPairs][kColumnPairs] = {};
  for (int64_t k = 0; k < depth; k += 16) {
    if (kRows > kInt8FewRows) __builtin_prefetch(next + k * kLanes, 0, 2);
    uint8x16_t x[2][kRowPairs];
#pragma GCC unroll 4
    for (int i = 0; i < kRowPairs; ++i) {
      const uint8_t* row = q + 2 * i * depth + k;
      const auto even = (uint64x2_t)vld1q_u8(row);
      const auto odd = 2 * i + 1 < kRows ? (uint64x2_t)vld1q_u8(row + depth) : even;
      x[0][i] = (uint8x16_t)vzip1q_u64(even, odd);
      x[1][i] = (uint8x16_t)vzip2q_u64(even, odd);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
      for (int c = 0; c < kColumnPairs; ++c) {
        const int64_t place = c / 2 * panel + (k + 8 * half) * kLanes + c % 2 * 16;
        const int8x16_t w = vld1q_s8(packed + place);
#pragma GCC unroll 4
        for (int i = 0; i < kRowPairs; ++i) {
          total[i][c] = Octets::multiply_add(x[half][i], w, total[i][c]);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRowPairs; ++i) {
    int32_t* even = sums + 2 * i * kPanels * kLanes;
    int32_t* odd = even + kPanels * kLanes;
#pragma GCC unroll 8
    for (int c = 0; c < kColumnPairs; ++c) {
      vst1_s32(even + 2 * c, vget_low_s32(total[i][c]));
      if (2 * i + 1 < kRows) vst1_s32(odd + 2 * c, vget_high_s32(total[i][c]));
    }
  }
}
#endif

// Computes the block with the instructions of `Dot`.
template <class Dot, int kRows, int kPanels>
FASTBERT_INLINE void int8_sums(const void* q, int64_t depth, const int8_t* packed,
                               const int8_t* next, int32_t* sums) {
#if defined(FASTBERT_LEVEL_I8MM)
  if constexpr (Dot::kGroup == 8) {
    int8_octets<kRows, kPanels>((const uint8_t*)q, depth, packed, next, sums);
  } else {
    int8_block<Dot, kRows, kPanels>(q, depth, packed, next, sums);
  }
#else
  int8_block<Dot, kRows, kPanels>(q, depth, packed, next, sums);
#endif
}

// Calls int8_sums for `rows` rows, 1 to kInt8Rows.
template <class Dot>
FASTBERT_INLINE void int8_rows(int rows, const void* q, int64_t depth, const int8_t* packed,
                               const int8_t* next, int32_t* sums) {
  switch (rows) {
    case 1:
      return int8_sums<Dot, 1, kInt8MostPanels>(q, depth, packed, next, sums);
    case 2:
      return int8_sums<Dot, 2, kInt8MostPanels>(q, depth, packed, next, sums);
    case 3:
      return int8_sums<Dot, 3, kInt8Panels>(q, depth, packed, next, sums);
    case 4:
      return int8_sums<Dot, 4, kInt8Panels>(q, depth, packed, next, sums);
    case 5:
      return int8_sums<Dot, 5, kInt8Panels>(q, depth, packed, next, sums);
    default:
      return int8_sums<Dot, kInt8Rows, kInt8Panels>(q, depth, packed, next, sums);
  }
}

// Computes (sum - zero * column_sum) * row_scale * column_scale for `rows` rows from `row` on and
// the columns [begin, end), and then runs the epilogue. A row of sums has `width` elements, which
// is at least end - begin.
FASTBERT_INLINE void int8_epilogue(const Int8Gemm& p, int32_t* sums, int64_t width, int64_t row,
                                   int64_t rows, int64_t begin, int64_t end) {
  // The fp32 values overwrite the integer sums in the same memory.
  auto* values = (float*)sums;
  for (int64_t n = 0; n < width && begin + n < end; n += kLanes) {
    WordVec columns;  // sums of the weight's columns, padded to whole panels
    __builtin_memcpy(&columns, p.column_sum + begin + n, kBytes);
    const Vec column_scale = load(p.column_scale + begin + n);
    for (int64_t r = 0; r < rows; ++r) {
      WordVec sum;
      __builtin_memcpy(&sum, sums + r * width + n, kBytes);
      const WordVec exact = sum - (uint32_t)p.zero[row + r] * columns;
      store(values + r * width + n,
            __builtin_convertvector((IntVec)exact, Vec) * (column_scale * p.row_scale[row + r]));
    }
  }
  finish_tile(p, {values, width, row, begin, (int)rows, (int)(end - begin)});
}

// Computes one block of the result, four panels at a time. The four panels stay in the first-level
// and second-level caches while all rows are multiplied. The first register blocks of rows also
// prefetch the next four panels, because products with these panels would otherwise begin by
// waiting for memory.
template <class Dot>
void int8_gemm_vectors(const Int8Gemm& p, const Int8Block& block) {
  alignas(64) int32_t sums[kInt8Rows * kInt8MostPanels * kLanes];
  const int64_t row_bytes = p.depth * (int64_t)sizeof(typename Dot::Element);
  for (int64_t first = block.panel_begin; first < block.panel_end; first += kInt8MostPanels) {
    int64_t row = block.row_begin;
    // The numbers of rows in register blocks differ by at most one: 8 rows become blocks of 4 and 4
    // rows, not of 6 and 2.
    int64_t blocks = (block.row_end - row + kInt8Rows - 1) / kInt8Rows;
    for (int64_t ahead = kInt8MostPanels; blocks > 0; --blocks, ++ahead) {
      const int rows = (int)((block.row_end - row + blocks - 1) / blocks);
      const int panels = rows <= kInt8FewRows ? kInt8MostPanels : kInt8Panels;
      const bool more = ahead < 2 * kInt8MostPanels && first + ahead < block.panel_end;
      const int8_t* next = p.packed + (more ? first + ahead : first) * kLanes * p.depth;
      for (int64_t panel = first; panel < first + kInt8MostPanels; panel += panels) {
        const int64_t begin = panel * kLanes, width = panels * kLanes;
        if (begin >= p.n) break;
        int8_rows<Dot>(rows, (const char*)p.q + row * row_bytes, p.depth,
                       p.packed + begin * p.depth, next, sums);
        const int64_t end = begin + width < p.n ? begin + width : p.n;
        int8_epilogue(p, sums, width, row, rows, begin, end);
      }
      row += rows;
    }
  }
}

Int8Layout int8_layout() {
#if defined(FASTBERT_LEVEL_I8MM)
  return {kLanes, kByteGroup};
#elif FASTBERT_LEVEL_BYTES == 64
  return {kLanes, has_quads() ? 4 : 2};
#else
  return {kLanes, 2};
#endif
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL

#if defined(FASTBERT_LEVEL_TILES)
#include "int8_tile_kernel.h"
#endif

namespace fastbert::cpu::FASTBERT_LEVEL {

void int8_gemm(const Int8Gemm& p, const Int8Block& block) {
#if defined(FASTBERT_LEVEL_TILES)
  if (p.group == 4) return int8_gemm_tiles(p, block);
#elif defined(FASTBERT_LEVEL_I8MM)
  if (p.group == kByteGroup) return int8_gemm_vectors<Octets>(p, block);
#elif FASTBERT_LEVEL_BYTES == 64
  if (p.group == 4) return int8_gemm_vectors<Quads>(p, block);
#endif
  int8_gemm_vectors<Pairs>(p, block);
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
