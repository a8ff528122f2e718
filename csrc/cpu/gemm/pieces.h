// The epilogue of a block of sums, divided into pieces that run between the products of the next
// block.
//
// A step of four tile products takes 64 cycles. During these cycles, about 64 instructions on
// registers of 64 bytes can run at no cost. On a Xeon with AMX, every further instruction costs its
// full time. The epilogues that a model needs are therefore as short as possible. They process sums
// in the order in which the sums are stored, and transpose pairs of bf16 instead of sums. They also
// prefetch the cache lines of the result before the stores.

#pragma once

#include "packed_result.h"
#include "tasks.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// The epilogue of one tile of sums, divided into `count` pieces. piece(g, tile, i) runs piece i.
// The memory after the tile is unused and as large as the tile, so a piece may write to it.
struct Pieces {
  using Piece = void (*)(const Gemm& g, const Tile& tile, int i);

  Tile tile = {};
  Piece piece = nullptr;
  int count = 0;
};

constexpr int kPieceRows = 4, kTilePieces = kPanel / kPieceRows;
// The number of kLanes x kLanes squares in a tile of sums, and in the same tile after its sums are
// converted to pairs of bf16.
constexpr int kSumSquares = 4, kPairSquares = 2;

FASTBERT_INLINE int pieces_of(int rows) { return (int)quotient_up(rows, kPieceRows); }

// Runs the epilogue of up to kPieceRows rows of sums, which are rows of the result.
__attribute__((noinline)) void finish_rows(const Gemm& g, const Tile& tile, int i) {
  const int row = kPieceRows * i;
  finish_tile(g, {tile.sums + row * tile.stride, tile.stride, tile.row + row, tile.column,
                  clamp_count(tile.rows - row, kPieceRows), tile.columns});
}

// Each of the first kSumSquares pieces transposes one square of sums. Each later piece runs the
// epilogue of up to kPieceRows rows of the result.
__attribute__((noinline)) void finish_turned_rows(const Gemm& g, const Tile& tile, int i) {
  float* turned = tile.sums + kPanel * kPanel;
  if (i < kSumSquares) return turn_part(tile.sums, kPanel, turned, i);
  finish_rows(g, {turned, kPanel, tile.column, tile.row, tile.columns, tile.rows}, i - kSumSquares);
}

// Runs the epilogue of kPieceRows rows of sums, and stores the results to the packed right operand
// of the next product.
template <class Function>
__attribute__((noinline)) void finish_pairs(const Gemm& g, const Tile& tile, int i) {
  pack_rows<BF16, Function, kPieceRows>(g, tile, kPieceRows * i, next_pairs(g, tile), tile.row);
}

// Each of the first kTilePieces pieces runs the epilogue of kPieceRows rows of sums, and stores the
// results as pairs of bf16. Each later piece transposes one square of pairs to rows of the result.
template <class Function>
__attribute__((noinline)) void finish_turned_pairs(const Gemm& g, const Tile& tile, int i) {
  uint32_t* words = (uint32_t*)(tile.sums + kPanel * kPanel);
  auto* out = (uint16_t*)g.out + tile.column * g.out_row + tile.row;
  if (i < kTilePieces) {
    for (int row = kPieceRows * i; row < kPieceRows * (i + 1) && row < tile.columns; ++row) {
      __builtin_prefetch(out + row * g.out_row, 1, 3);
    }
    return pack_rows<BF16, Function, kPieceRows>(g, tile, kPieceRows * i, PairPanel{words}, 0);
  }
  const int first = (i - kTilePieces) * kLanes, rows = clamp_count(tile.columns - first, kLanes);
  Vec block[kLanes];
  __builtin_memcpy(block, words + first * kLanes, sizeof(block));
  transpose(block);
  for (int row = 0; row < rows; ++row) {
    store((float*)(out + (first + row) * g.out_row), block[row]);
  }
}

// Returns the pieces for a tile in which a row of sums is a row of the result.
inline Pieces row_pieces(const Tile& tile) { return {tile, finish_rows, pieces_of(tile.rows)}; }

template <class Function>
FASTBERT_INLINE Pieces pair_pieces(const Gemm& g, const Tile& tile) {
  if (g.next) return {tile, finish_pairs<Function>, kTilePieces};
  return {tile, finish_turned_pairs<Function>, kTilePieces + kPairSquares};
}

// Returns the pieces for a tile in which a row of sums is a column of the result.
inline Pieces turned_pieces(const Gemm& g, const Tile& tile) {
  const bool pairs =
      g.out_format == Format::bf16 && !g.residual.data && !g.pre_activation && tile.rows == kPanel;
  if (!g.next && !pairs) return {tile, finish_turned_rows, kSumSquares + pieces_of(tile.columns)};
  Pieces pieces;
  with_activation<BF16>(g.activation,
                        [&](auto function) { pieces = pair_pieces<decltype(function)>(g, tile); });
  return pieces;
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
