// The fp32 matrix products of attention. The right operand is packed in panels, and the sums of a
// tile stay in registers.
//
// A product is c = a b for a left operand a (rows, depth), a right operand b (depth, columns) and a
// result c (rows, columns). Elements of a are broadcast one by one, so a may have any strides. b is
// packed in panels of kPanel columns, and each panel is stored as (depth, kPanel). The operands are
// fp32 for every storage format of the tensors. The terms of an element of c are added in order
// along the depth, in chains of kChain terms. The order is the same in every tile.

#pragma once

#include "../isa/formats.h"
#include "../rows/philox.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// The largest number of rows in a tile of sums. The sums take two registers for each row. They take
// most of the registers of the processor, which has 16, or 32 with AVX-512. NEON also has 32, of
// which one more per row holds an element of the left operand.
#if defined(FASTBERT_LEVEL_NEON)
constexpr int kProductRows = 8;
#else
constexpr int kProductRows = kBytes == 64 ? 12 : 6;
#endif

FASTBERT_INLINE int64_t whole_panels(int64_t n) { return (n + kPanel - 1) / kPanel * kPanel; }

// The left operand of a product. Its element (r, k) is data[r * row + k * step].
struct Left {
  const float* data;
  int64_t row, step;
};

// The update of the result c by a product: c = a b (store), c += a b (add), or c = factors[row] * c
// + a b (rescale).
enum class Update { store, add, rescale };

template <int kRows, Update kUpdate>
FASTBERT_INLINE void product_tile(Left a, const float* panel, int64_t depth, float* c,
                                  int64_t c_row, const float* factors) {
  Vec sums[kRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = Vec{};
  for (int64_t k = 0; k < depth; ++k, a.data += a.step, panel += kPanel) {
    const Vec b0 = load(panel), b1 = load(panel + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Factor x = factor(a.data[r * a.row]);
      sums[r][0] = fma(x, b0, sums[r][0]);
      sums[r][1] = fma(x, b1, sums[r][1]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      float* place = c + r * c_row + i * kLanes;
      Vec sum = sums[r][i];
      if constexpr (kUpdate == Update::add) sum += load(place);
      if constexpr (kUpdate == Update::rescale) sum = fma(splat(factors[r]), load(place), sum);
      store(place, sum);
    }
  }
}

// Computes as many tiles of kRows rows as possible, and the remaining rows in smaller tiles.
template <int kRows, Update kUpdate>
FASTBERT_INLINE void product_tiles(Left a, int64_t rows, const float* panel, int64_t depth,
                                   float* c, int64_t c_row, const float* factors) {
  for (; rows >= kRows; rows -= kRows) {
    product_tile<kRows, kUpdate>(a, panel, depth, c, c_row, factors);
    a.data += kRows * a.row;
    c += kRows * c_row;
    if constexpr (kUpdate == Update::rescale) factors += kRows;
  }
  if constexpr (kRows > 1) {
    constexpr int kFewer = kRows > 6 ? 6 : kRows > 4 ? 4 : kRows / 2;
    if (rows > 0) product_tiles<kFewer, kUpdate>(a, rows, panel, depth, c, c_row, factors);
  }
}

// The largest number of terms that are added one after another. A longer sum is the sum of several
// such chains, which has a smaller rounding error than one long chain.
constexpr int64_t kChain = kBytes == 16 ? 32 : 64;

// Updates c (rows, panels * kPanel) by the product a b. Adjacent panels of b are panel_stride
// elements apart.
template <Update kUpdate>
__attribute__((noinline)) void product(Left a, int64_t rows, const float* b, int64_t panel_stride,
                                       int64_t panels, int64_t depth, float* c, int64_t c_row,
                                       const float* factors = nullptr) {
  for (int64_t i = 0; i < panels; ++i, b += panel_stride, c += kPanel) {
    const int64_t first = depth < kChain ? depth : kChain;
    product_tiles<kProductRows, kUpdate>(a, rows, b, first, c, c_row, factors);
    Left rest = a;
    for (int64_t k = first; k < depth; k += kChain) {
      rest.data += kChain * a.step;
      const int64_t terms = depth - k < kChain ? depth - k : kChain;
      product_tiles<kProductRows, Update::add>(rest, rows, b + k * kPanel, terms, c, c_row,
                                               nullptr);
    }
  }
}

// Rows of a tensor in its storage format. Row n is read as zeros if used[n] is 0.
template <class F>
struct Source {
  const typename F::Storage* data;
  int64_t stride;
  const uint32_t* used;  // nonzero for each row that is used; null if all rows are used

  FASTBERT_INLINE Vec load(int64_t row, int64_t column, int count) const {
    if (used != nullptr && used[row] == 0) return Vec{};
    return F::load(data + row * stride + column, count);
  }
};

// Copies the matrix `source` (rows, columns) to fp32. Rows of the copy are one after another, and
// each row is padded to a whole number of panels.
template <class F>
void copy_rows(const Source<F>& source, int64_t rows, int64_t columns, float* to) {
  const int64_t width = whole_panels(columns);
  for (int64_t r = 0; r < rows; ++r, to += width) {
    for_each_vector(columns,
                    [&](int64_t n, int count) { store(to + n, source.load(r, n, count)); });
  }
}

// Packs the matrix `source` (rows, columns) as a right operand with the same rows and columns. Each
// panel has memory for `depth` rows, and only its first `rows` rows are written.
template <class F, class Rows = Source<F>>
void pack_columns(const Rows& source, int64_t rows, int64_t columns, int64_t depth, float* to) {
  for (int64_t n = 0; n < columns; n += kPanel, to += depth * kPanel) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int i = 0; i < 2; ++i) {
        const int64_t left = columns - n - i * kLanes;
        const int count = left < kLanes ? (left < 0 ? 0 : (int)left) : kLanes;
        const Vec v = count > 0 ? source.load(r, n + i * kLanes, count) : Vec{};
        store(to + r * kPanel + i * kLanes, v);
      }
    }
  }
}

// Packs the transpose of the matrix `source` (rows, columns) as a right operand. Each panel is
// (columns, kPanel), and zeros pad the last panel.
template <class F, class Rows = Source<F>>
void pack_rows(const Rows& source, int64_t rows, int64_t columns, float* to) {
  for (int64_t first = 0; first < whole_panels(rows); first += 4) {
    float* panel = to + first / kPanel * columns * kPanel + first % kPanel;
    for_each_vector(columns, [&](int64_t n, int count) {
      WordVec block[4];
      for (int i = 0; i < 4; ++i) {
        const int64_t row = first + i;
        block[i] = row < rows ? (WordVec)source.load(row, n, count) : WordVec{};
      }
      // After this call, word 4 b + i of register block[j] is element (first + i, n + 4 b + j) of
      // the source, for b < kLanes / 4.
      transpose_blocks(block);
      for (int j = 0; j < 4; ++j) {
        for (int b = 0; b < kLanes / 4; ++b) {
          if (4 * b + j < count) {
            __builtin_memcpy(panel + (n + 4 * b + j) * kPanel, (const char*)&block[j] + 16 * b, 16);
          }
        }
      }
    });
  }
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
