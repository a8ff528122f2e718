// The matrix products of strip_kernel.h for a strip of kStrip rows, computed with the bf16
// dot-product instruction. strip_tiles.h defines the same functions with AMX tiles.

#pragma once

#include "../gemm/packing.h"
#include "../isa/pairs.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

FASTBERT_INLINE void begin_strips() {}
FASTBERT_INLINE void end_strips() {}

// kMayOverlap tells whether this level can run the steps of a product between the instructions of a
// softmax. overlaps() tells whether it does so with the current settings.
constexpr bool kMayOverlap = false;
FASTBERT_INLINE constexpr bool overlaps() { return false; }

#if defined(FASTBERT_LEVEL_MATRICES)
// Computes c = a b or, if kAdd is true, c += a b, as the function below does, by products of two
// rows by two columns.
template <bool kAdd>
__attribute__((noinline)) void strip_product(const uint16_t* a, int64_t a_row, const char* b,
                                             int64_t steps, float* c, int64_t c_row) {
  constexpr int kRows = 8;  // rows per iteration, each with two registers of sums
  for (int64_t row = 0; row < kStrip; row += kRows, a += kRows * a_row, c += kRows * c_row) {
    MatrixSums<kRows, kPanel> sums = {};
#pragma GCC unroll 8
    for (int i = 0; i < (kAdd ? kRows : 0); i += 2) {
#pragma GCC unroll 2
      for (int n = 0; n < 2; ++n) {
        const Vec even = load(c + i * c_row + n * kLanes);
        const Vec odd = load(c + (i + 1) * c_row + n * kLanes);
        sums.set_rows(i, n, even, odd);
      }
    }
    for (int64_t step = 0; step < steps; ++step) {
      sums.add_four(
          [&](int r) __attribute__((always_inline)) {
            return load((const float*)(a + r * a_row + step * kStep));
          },
          (const uint32_t*)(b + step * kPanelStep), 2 * kPanel);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      store(c + r * c_row, sums.of_row(r, 0));
      store(c + r * c_row + kLanes, sums.of_row(r, 1));
    }
  }
}
#else
// Computes c = a b or, if kAdd is true, c += a b, for a strip of rows of a and one panel of b. a is
// bf16, and its rows are padded to whole steps of kStep elements.
template <bool kAdd>
__attribute__((noinline)) void strip_product(const uint16_t* a, int64_t a_row, const char* b,
                                             int64_t steps, float* c, int64_t c_row) {
  constexpr int kRows = 8;  // rows per iteration, each with two registers of sums
  for (int64_t row = 0; row < kStrip; row += kRows, a += kRows * a_row, c += kRows * c_row) {
    Vec sums[kRows][2];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sums[r][0] = kAdd ? load(c + r * c_row) : Vec{};
      sums[r][1] = kAdd ? load(c + r * c_row + kLanes) : Vec{};
    }
    for (int64_t step = 0; step < steps; ++step) {
      for (int pair = 0; pair < kStep / 2; ++pair) {
        const char* words = b + step * kPanelStep + pair * kStepBytes;
        const Vec low = load((const float*)words), high = load((const float*)(words + kWeightTile));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          float word;
          __builtin_memcpy(&word, a + r * a_row + step * kStep + 2 * pair, sizeof(word));
          sums[r][0] = dot_bf16(splat(word), low, sums[r][0]);
          sums[r][1] = dot_bf16(splat(word), high, sums[r][1]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      store(c + r * c_row, sums[r][0]);
      store(c + r * c_row + kLanes, sums[r][1]);
    }
  }
}

#endif

// The product c = a b or, if `add` is true, the update c += a b, for a strip of rows of a and all
// panels of b. a is bf16, and its rows are padded to whole steps of kStep elements.
struct StripProduct {
  const uint16_t* a;
  int64_t a_row;
  const char* b;
  int64_t steps;  // number of steps in a row of a
  float* c;
  int64_t c_row;
  bool add;
  int64_t panels = 0, panel = 0;

  FASTBERT_INLINE bool done() const { return panel >= panels; }

  // Computes the product with the next panel.
  FASTBERT_INLINE void advance() {
    const char* at = b + panel * steps * kPanelStep;
    float* sums = c + panel * kPanel;
    if (add) {
      strip_product<true>(a, a_row, at, steps, sums, c_row);
    } else {
      strip_product<false>(a, a_row, at, steps, sums, c_row);
    }
    ++panel;
  }

  FASTBERT_INLINE void finish() {
    while (!done()) advance();
  }
};

}  // namespace fastbert::cpu::FASTBERT_LEVEL
