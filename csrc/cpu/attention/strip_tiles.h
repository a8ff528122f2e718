// The matrix products of strip_kernel.h for a strip of kStrip rows, computed with AMX tiles.
// strip_dots.h defines the same functions with the bf16 dot-product instruction.

#pragma once

#include "../gemm/tile_kernel.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

FASTBERT_INLINE void begin_strips() { configure_tiles(); }
FASTBERT_INLINE void end_strips() { tile_release(); }

// kMayOverlap tells whether this level can run the steps of a product between the instructions of a
// softmax. overlaps() tells whether it does so with the current settings.
constexpr bool kMayOverlap = true;
FASTBERT_INLINE bool overlaps() { return tile_schedule != TileSchedule::in_turn; }

// The product c = a b or, if `add` is true, the update c += a b, for a strip of rows of a and all
// panels of b. a is bf16, and its rows are padded to whole steps of kStep elements. The sums of a
// panel stay in tile registers from the panel's first step to its last step.
struct StripProduct {
  const uint16_t* a;
  int64_t a_row;
  const char* b;
  int64_t steps;  // number of steps in a row of a
  float* c;
  int64_t c_row;
  bool add;
  int64_t panels = 0, panel = 0, step = 0;

  FASTBERT_INLINE bool done() const { return panel >= panels; }

  // Computes one step of the product. The function is not inlined, so that its machine code exists
  // only once.
  __attribute__((noinline)) void advance() {
    float* sums = c + panel * kPanel;
    if (step == 0) begin(sums);
    multiply_step<2, 1, Passing::none>((const char*)(a + step * kStep), 2 * a_row,
                                       b + (panel * steps + step) * kPanelStep, 0);
    if (++step < steps) return;
    store_block<2, 1>(sums, c_row);
    ++panel;
    step = 0;
  }

  FASTBERT_INLINE void finish() {
    while (!done()) advance();
  }

 private:
  FASTBERT_INLINE void begin(const float* sums) const {
    if (!add) {
      tile_zero<0>();
      tile_zero<1>();
      tile_zero<2>();
      tile_zero<3>();
      return;
    }
    const float* lower = sums + kMostTileRows * c_row;
    tile_load<0>(sums, 4 * c_row);
    tile_load<1>(sums + kLanes, 4 * c_row);
    tile_load<2>(lower, 4 * c_row);
    tile_load<3>(lower + kLanes, 4 * c_row);
  }
};

}  // namespace fastbert::cpu::FASTBERT_LEVEL
