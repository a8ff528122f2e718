// The products of a strip of rows in strip_kernel.h, on AMX tiles. strip_dots.h has the same
// functions for dot products of bf16.

#pragma once

#include "../gemm/tile_kernel.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

FASTBERT_INLINE void begin_strips() { configure_tiles(); }
FASTBERT_INLINE void end_strips() { tile_release(); }

// Computes c (+)= a b for a strip of rows and one panel, with a in bf16 and in whole steps.
template <bool kAdd>
FASTBERT_INLINE void strip_product(const uint16_t* a, int64_t a_row, const char* b, int64_t steps,
                                   float* c, int64_t c_row) {
  if constexpr (kAdd) {
    const float* lower = c + kMostTileRows * c_row;
    tile_load<0>(c, 4 * c_row);
    tile_load<1>(c + kLanes, 4 * c_row);
    tile_load<2>(lower, 4 * c_row);
    tile_load<3>(lower + kLanes, 4 * c_row);
  } else {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
  }
  for (int64_t step = 0; step < steps; ++step) {
    multiply_step<2, 1>((const char*)(a + step * kStep), 2 * a_row, b + step * kPanelStep, 0);
  }
  store_block<2, 1>(c, c_row);
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
