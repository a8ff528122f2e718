// int8 products on AMX tiles: tiles of unsigned activations times tiles of signed weights (TDPBUSD
// in Intel's Software Developer's Manual).
//
// A panel of the prepacked weight is already a column of tiles, because 16 groups of four along k
// form one tile of 16 rows. The rows of q are padded to whole tiles. Two tiles of rows meet two
// panels, so each loaded tile is used twice.

#pragma once

#include "../isa/tile.h"
#include "int8_kernel.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// The rows of finished sums that still wait for their epilogue.
struct PendingRows {
  int32_t* sums = nullptr;
  int64_t row = 0, rows = 0, begin = 0, end = 0;

  FASTBERT_INLINE void finish(const Int8Gemm& p, int64_t most) {
    const int64_t count = rows < most ? rows : most;
    if (count == 0) return;
    int8_epilogue(p, sums, 2 * kLanes, row, count, begin, end);
    sums += count * 2 * kLanes;
    row += count;
    rows -= count;
  }
};

// Tiles 0 to 3 hold sums, 4 and 5 rows of q, 6 and 7 weights. Each step finishes `most` rows of the
// block before, all of which leave `sums` before the tiles are stored there.
template <int kTall>
FASTBERT_INLINE void int8_tile_sums(const Int8Gemm& p, const uint8_t* q, const int8_t* packed,
                                    int32_t* sums, PendingRows& waiting, int64_t most) {
  const int64_t depth = p.depth;
  const int8_t* second = packed + depth * kLanes;
  const uint8_t* lower = q + kMostTileRows * depth;
  PendingRows pending = waiting;  // in registers
  tile_zero<0>();
  tile_zero<1>();
  if constexpr (kTall == 2) {
    tile_zero<2>();
    tile_zero<3>();
  }
  for (int64_t k = 0; k < depth; k += kMostTileBytes) {
    tile_load<6>(packed + k * kLanes, kMostTileBytes);
    tile_load<7>(second + k * kLanes, kMostTileBytes);
    tile_load<4>(q + k, depth);
    tile_product_us<0, 4, 6>();
    tile_product_us<1, 4, 7>();
    if constexpr (kTall == 2) {
      tile_load<5>(lower + k, depth);
      tile_product_us<2, 5, 6>();
      tile_product_us<3, 5, 7>();
    }
    pending.finish(p, most);
  }
  constexpr int64_t kWidth = 2 * kLanes;
  tile_store<0>(sums, kWidth * 4);
  tile_store<1>(sums + kLanes, kWidth * 4);
  if constexpr (kTall == 2) {
    tile_store<2>(sums + kMostTileRows * kWidth, kWidth * 4);
    tile_store<3>(sums + kMostTileRows * kWidth + kLanes, kWidth * 4);
  }
}

void int8_gemm_tiles(const Int8Gemm& p, const Int8Block& block) {
  constexpr int64_t kBlockRows = 2 * kMostTileRows;
  alignas(64) int32_t sums[kBlockRows * 2 * kLanes];
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, kMostTileRows, kMostTileBytes);
  tile_configure(shapes);
  const int64_t steps = p.depth / kMostTileBytes, most = (kBlockRows + steps - 1) / steps;
  // The products of fewer steps end long before the epilogue beside them.
  constexpr int64_t kFewestSteps = 8;
  const bool overlaps = tile_schedule != TileSchedule::in_turn && steps >= kFewestSteps;
  PendingRows pending;
  for (int64_t panel = block.panel_begin; panel < block.panel_end; panel += 2) {
    const int64_t begin = panel * kLanes;
    if (begin >= p.n) break;
    const int64_t end = begin + 2 * kLanes < p.n ? begin + 2 * kLanes : p.n;
    const int8_t* packed = p.packed + begin * p.depth;
    for (int64_t row = block.row_begin; row < block.row_end; row += kBlockRows) {
      const uint8_t* q = (const uint8_t*)p.q + row * p.depth;
      const int64_t left = block.row_end - row;
      const int64_t rows = left < kBlockRows ? left : kBlockRows;
      if (rows > kMostTileRows) {
        int8_tile_sums<2>(p, q, packed, sums, pending, most);
      } else {
        int8_tile_sums<1>(p, q, packed, sums, pending, most);
      }
      pending = {sums, row, rows, begin, end};
      if (!overlaps) pending.finish(p, kBlockRows);
    }
  }
  pending.finish(p, kBlockRows);
  tile_release();
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
