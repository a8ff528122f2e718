// int8 products on AMX tiles. Tiles of unsigned activations are multiplied by tiles of signed
// weights (TDPBUSD in Intel's Software Developer's Manual).
//
// The panels of the prepacked weight need no rearrangement: 16 adjacent groups of four elements
// along k form one tile of 16 rows. The rows of q are padded to whole tiles. Two tiles of rows are
// multiplied by two panels, so each loaded tile is used twice.

#pragma once

#include "../isa/tile.h"
#include "int8_kernel.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// Rows of complete sums whose epilogue has not run yet. `finish` runs the epilogue of the next
// `most` rows.
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

// Computes the sums of kTall tiles of rows of q and two panels of the weight. Tiles 0 to 3 hold
// sums, tiles 4 and 5 hold rows of q, and tiles 6 and 7 hold weights. Each step also runs the
// epilogue of up to `most` rows of the previous block (`waiting`). The epilogues of all these rows
// end before the new sums overwrite `sums`.
template <int kTall>
FASTBERT_INLINE void int8_tile_sums(const Int8Gemm& p, const uint8_t* q, const int8_t* packed,
                                    int32_t* sums, PendingRows& waiting, int64_t most) {
  const int64_t depth = p.depth;
  const int8_t* second = packed + depth * kLanes;
  const uint8_t* lower = q + kMostTileRows * depth;
  PendingRows pending = waiting;  // a local copy, which stays in registers
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
  // With fewer steps, the products of a block would end long before the epilogue of the previous
  // block, so the two do not overlap.
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
