// The epilogue of a block of sums in pieces, which run between the products of the next block.
//
// A step of four tile products takes 64 cycles, in which about 64 instructions on registers of 64
// bytes run beside it for nothing. On a Xeon with AMX, all that goes beyond takes its whole time.
// So the epilogues that a model needs are as short as possible: they work on the sums as they lie,
// they transpose pairs of bf16 instead of sums, and they fetch the lines of the result before they
// store to them.

#pragma once

#include "packed_result.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// The pieces for a tile of sums, which lies in front of as much free memory.
struct Pieces {
  using Piece = void (*)(const Gemm& g, const Tile& tile, int i);

  Tile tile = {};
  Piece piece = nullptr;
  int count = 0;
};

constexpr int kPieceRows = 4, kTilePieces = kPanel / kPieceRows;

// Finishes rows of sums that lie as the result does.
__attribute__((noinline)) void finish_rows(const Gemm& g, const Tile& tile, int i) {
  const int row = kPieceRows * i;
  finish_tile(g, {tile.sums + row * tile.stride, tile.stride, tile.row + row, tile.column,
                  clamp_count(tile.rows - row, kPieceRows), tile.columns});
}

// Transposes the sums, then finishes rows of the result.
__attribute__((noinline)) void finish_turned_rows(const Gemm& g, const Tile& tile, int i) {
  constexpr int kSquares = 4;
  float* turned = tile.sums + kPanel * kPanel;
  if (i < kSquares) return turn_part(tile.sums, kPanel, turned, i);
  finish_rows(g, {turned, kPanel, tile.column, tile.row, tile.columns, tile.rows}, i - kSquares);
}

// Finishes rows of sums to the panels of the next product.
template <class Function>
__attribute__((noinline)) void finish_pairs(const Gemm& g, const Tile& tile, int i) {
  const PairPanel panel = {(uint32_t*)g.next + tile.column * (g.n / 2)};
  pack_rows<BF16, Function, kPieceRows>(g, tile, kPieceRows * i, panel, tile.row);
}

// Finishes rows of sums to pairs in bf16, then transposes these to rows of the result.
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

// Returns the pieces for a tile whose rows belong to rows of the result.
inline Pieces row_pieces(const Tile& tile) {
  return {tile, finish_rows, (tile.rows + kPieceRows - 1) / kPieceRows};
}

template <class Function>
FASTBERT_INLINE Pieces pair_pieces(const Gemm& g, const Tile& tile) {
  if (g.next) return {tile, finish_pairs<Function>, kTilePieces};
  return {tile, finish_turned_pairs<Function>, kTilePieces + 2};
}

// Returns the pieces for a tile whose rows belong to columns of the result.
inline Pieces turned_pieces(const Gemm& g, const Tile& tile) {
  const bool pairs =
      g.out_format == Format::bf16 && !g.residual.data && !g.pre_activation && tile.rows == kPanel;
  if (!g.next && !pairs) {
    return {tile, finish_turned_rows, 4 + (tile.columns + kPieceRows - 1) / kPieceRows};
  }
  switch (g.activation) {
    case Activation::gelu:
      return pair_pieces<GeluTo<BF16>>(g, tile);
    case Activation::gelu_tanh:
      return pair_pieces<Each<GeluTanh>>(g, tile);
    case Activation::relu:
      return pair_pieces<Each<Relu>>(g, tile);
    default:
      return pair_pieces<Same>(g, tile);
  }
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
