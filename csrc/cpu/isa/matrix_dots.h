// bf16 products on ARM: two rows by two columns, with four elements of each along k, in one
// instruction (BFMMLA in the Arm Architecture Reference Manual). Its sums have the bits of two dot
// products (BFDOT) one after the other, so kernels may mix both.
//
// In a packed panel (gemm/packing.h), two neighbouring words of a column are next to each other:
// the word rows w and w + 1, for even w, are stored as columns of two words. If the number of word
// rows is odd, the last one is stored as a row, and BFDOT multiplies it.

#pragma once

#include "vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// Return the lower halves, or the upper halves, of a and b in one register.
FASTBERT_INLINE Vec low_halves(Vec a, Vec b) {
  return (Vec)vzip1q_u64((uint64x2_t)a, (uint64x2_t)b);
}
FASTBERT_INLINE Vec high_halves(Vec a, Vec b) {
  return (Vec)vzip2q_u64((uint64x2_t)a, (uint64x2_t)b);
}

// Returns sum + a bᵀ. `a` has two rows of four bf16, `b` has two columns, and `sum` has the four
// sums, one row after the other. With the intrinsic, GCC 12 copies some of the sums in each round
// of a loop.
FASTBERT_INLINE Vec multiply_matrices(Vec a, Vec b, Vec sum) {
  asm("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(a), "w"(b));
  return sum;
}

// Returns the place in a panel of the word of a column, in a panel with `words` word rows.
FASTBERT_INLINE int64_t place_of_word(int64_t word, int64_t column, int64_t words) {
  if ((word | 1) >= words) return word * kPanel + column;
  return word / 2 * 2 * kPanel + 2 * column + word % 2;
}

// Stores the word rows w and w + 1 of kLanes columns. `panel` is the place of the first column.
FASTBERT_INLINE void store_word_pair(uint32_t* panel, Vec first, Vec second) {
  store((float*)panel, (Vec)vzip1q_u32((uint32x4_t)first, (uint32x4_t)second));
  store((float*)panel + kLanes, (Vec)vzip2q_u32((uint32x4_t)first, (uint32x4_t)second));
}

// The sums of kRows rows and kColumns columns in registers of two rows by two columns. A last
// single row is computed twice.
template <int kRows, int kColumns>
struct MatrixSums {
  static constexpr int kRowPairs = (kRows + 1) / 2, kColumnPairs = kColumns / 2;
  Vec sums[kRowPairs][kColumnPairs];

  // Adds the products of four words of each row and column. `row(i)` returns four words of row i.
  // `b` points to two pairs of word rows, which are `b_step` words apart.
  template <class Row>
  FASTBERT_INLINE void add_four(Row row, const uint32_t* b, int64_t b_step) {
    Vec x[2][kRowPairs];
#pragma GCC unroll 8
    for (int i = 0; i < kRowPairs; ++i) {
      const Vec even = row(2 * i), odd = 2 * i + 1 < kRows ? row(2 * i + 1) : even;
      x[0][i] = low_halves(even, odd);
      x[1][i] = high_halves(even, odd);
    }
    add_pair(x[0], b);
    // Otherwise, the compiler would load all columns first, and have too few registers for them.
    asm volatile("" ::: "memory");
    add_pair(x[1], b + b_step);
  }

  // Adds the products of two words of each row, which `x` has for pairs of rows, and of each
  // column.
  FASTBERT_INLINE void add_pair(const Vec (&x)[kRowPairs], const uint32_t* b) {
#pragma GCC unroll 8
    for (int c = 0; c < kColumnPairs; ++c) {
      const Vec column = load((const float*)b + 4 * c);
#pragma GCC unroll 8
      for (int i = 0; i < kRowPairs; ++i) sums[i][c] = multiply_matrices(x[i], column, sums[i][c]);
    }
  }

  // Sets the register number n of the sums of the rows `row` and `row` + 1, for even `row`.
  FASTBERT_INLINE void set_rows(int row, int n, Vec even, Vec odd) {
    sums[row / 2][2 * n] = low_halves(even, odd);
    sums[row / 2][2 * n + 1] = high_halves(even, odd);
  }

  // Returns the register number n of the sums of a row, with kLanes columns.
  FASTBERT_INLINE Vec of_row(int row, int n) const {
    const Vec left = sums[row / 2][2 * n], right = sums[row / 2][2 * n + 1];
    return row % 2 == 0 ? low_halves(left, right) : high_halves(left, right);
  }
};

}  // namespace fastbert::cpu::FASTBERT_LEVEL
