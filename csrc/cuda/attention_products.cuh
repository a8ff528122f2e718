// The matrix products of attention that one warp computes. The operands are tiles in shared memory
// or weights in registers, and the sums are in registers.

#pragma once

#include "copy.cuh"
#include "mma.cuh"

namespace fastbert::cuda {

// Loads 16 rows and 16 columns of `tile` as a left operand, from row `first_row` and column 16 *
// step on.
template <int kHeadDim>
__device__ void load_left(LeftFragment& fragment, uint32_t tile, int first_row, int step) {
  using Tile = SharedTile<kHeadDim>;
  const uint32_t lane = threadIdx.x % 32;
  tile += first_row * Tile::kRowBytes;
  load_matrices(fragment.pairs, (tile + Tile::offset(lane % 16, lane / 16)) ^ (32 * step));
}

// Computes sums = left right^T for 16 * kRowTiles rows of `left` and 8 * kColumns rows of `right`.
// Both are tiles in shared memory with rows of kHeadDim elements.
template <class T, int kHeadDim, int kRowTiles, int kColumns>
__device__ void multiply_transposed(float (&sums)[kRowTiles][kColumns][4], uint32_t left,
                                    uint32_t right) {
  using Tile = SharedTile<kHeadDim>;
  // One ldmatrix loads four 8 x 8 matrices, which are two right operands. The first operand is
  // columns 0-7 and 8-15 of rows 0-7, and the second operand is the same columns of rows 8-15.
  const uint32_t lane = opaque(threadIdx.x) % 32;
  const uint32_t first = right + Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][j][i] = 0.0f;
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    LeftFragment rows[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) load_left<kHeadDim>(rows[m], left, 16 * m, step);
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      uint32_t pairs[4];
      load_matrices(pairs, (first ^ (32 * step)) + 8 * j * Tile::kRowBytes);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        multiply(sums[m][j], rows[m], {{pairs[0], pairs[1]}}, T{});
        multiply(sums[m][j + 1], rows[m], {{pairs[2], pairs[3]}}, T{});
      }
    }
  }
}

// Computes sums += weights right for 16 * kRowTiles rows. The weights are in the register layout of
// the sums of earlier products, and `right` is a tile in shared memory of 8 kColumns rows of
// kHeadDim elements.
template <class T, int kHeadDim, int kRowTiles, int kColumns>
__device__ void accumulate(float (&sums)[kRowTiles][kHeadDim / 8][4],
                           const float (&weights)[kRowTiles][kColumns][4], uint32_t right) {
  using Tile = SharedTile<kHeadDim>;
  // One ldmatrix loads four 8 x 8 matrices, which are two right operands of 16 rows and 8 columns.
  const uint32_t lane = opaque(threadIdx.x) % 32;
  const uint32_t first = right + Tile::offset(lane % 16, lane / 16);
#pragma unroll
  for (int step = 0; step < kColumns / 2; ++step) {
    LeftFragment left[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const float (&a)[4] = weights[m][2 * step];
      const float (&b)[4] = weights[m][2 * step + 1];
      left[m] = {{pair(a[0], a[1], T{}), pair(a[2], a[3], T{}), pair(b[0], b[1], T{}),
                  pair(b[2], b[3], T{})}};
    }
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; d += 2) {
      uint32_t pairs[4];
      load_transposed_matrices(pairs, (first ^ (16 * d)) + 16 * step * Tile::kRowBytes);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        multiply(sums[m][d], left[m], {{pairs[0], pairs[1]}}, T{});
        multiply(sums[m][d + 1], left[m], {{pairs[2], pairs[3]}}, T{});
      }
    }
  }
}

// Exchanges values between two lanes whose numbers differ only in `bit`. The lane whose bit is 1
// gives its `low` and receives the `high` of the other lane in its place.
template <int bit>
__device__ void exchange(uint32_t& low, uint32_t& high) {
  const bool upper = threadIdx.x & bit;
  const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? low : high, bit);
  (upper ? low : high) = received;
}

// Stores a row of sums multiplied by `factor`. With g = lane / 4, it is row g of 16 rows if `half`
// is 0, and row g + 8 if `half` is 1. Four lanes hold the pairs of columns of a row, and exchange
// pairs so that each lane stores chunks of 16 bytes. Nothing is stored if `exists` is false.
template <class T, int kColumns>
__device__ void store_row(T* to, const float (&sums)[kColumns][4], int half, float factor,
                          bool exists) {
  static_assert(kColumns % 4 == 0);
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int d = 0; d < kColumns; d += 4) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pairs[i] = pair(sums[d + i][2 * half] * factor, sums[d + i][2 * half + 1] * factor, T{});
    // The exchanges transpose 4 lanes x 4 pairs, so that lane t then holds the four pairs of chunk
    // t.
    exchange<1>(pairs[0], pairs[1]);
    exchange<1>(pairs[2], pairs[3]);
    exchange<2>(pairs[0], pairs[2]);
    exchange<2>(pairs[1], pairs[3]);
    // nvcc would split an ordinary store of the four pairs, but it does not split __stcg.
    if (exists)
      __stcg(reinterpret_cast<uint4*>(to + 8 * (d + t)),
             make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
  }
}

}  // namespace fastbert::cuda
