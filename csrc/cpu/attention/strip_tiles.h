// The products of strip_kernel.h for a strip of rows, computed on AMX tiles. strip_dots.h has the
// same functions for dot products of bf16.

#pragma once

#include "../gemm/tile_kernel.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

FASTBERT_INLINE void begin_strips() { configure_tiles(); }
FASTBERT_INLINE void end_strips() { tile_release(); }

// kMayOverlap: whether the steps of a product can run between other work. overlaps(): whether the
// steps do so now.
constexpr bool kMayOverlap = true;
FASTBERT_INLINE bool overlaps() { return tile_schedule != TileSchedule::in_turn; }

// The product c (+)= a b of a strip of rows and all panels. a is bf16 and padded to whole steps
// along k. The product keeps its sums in the tiles from its first step to its last step.
struct StripProduct {
  const uint16_t* a;
  int64_t a_row;
  const char* b;
  int64_t steps;  // steps along k of a panel
  float* c;
  int64_t c_row;
  bool add;
  int64_t panels = 0, panel = 0, step = 0;

  FASTBERT_INLINE bool done() const { return panel >= panels; }

  // Computes one step. The function is not inlined, so that the code of a step exists once.
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
