// The epilogue of a matrix product, which applies the activation or its gradient to a tile that has
// been rounded to 16 bits in shared memory. This file also defines the order of the tiles. A lane
// takes chunks of eight neighbouring columns.

#pragma once

#include "access.cuh"
#include "copy.cuh"
#include "gelu.cuh"
#include "gemm.cuh"
#include "mma.cuh"

namespace fastbert::cuda {

using FastGelu = GeluBy<HalfPrecision>;
using FastGeluTanh = GeluTanhBy<HalfPrecision>;

constexpr int kChunk = 8;

inline __device__ float2 unpack(uint32_t pair, __nv_bfloat16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
inline __device__ float2 unpack(uint32_t pair, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

template <class T>
__device__ void unpack(const uint4& chunk, float (&x)[kChunk], T) {
  const uint32_t pairs[] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 both = unpack(pairs[i], T{});
    x[2 * i] = both.x;
    x[2 * i + 1] = both.y;
  }
}

template <class T>
__device__ uint4 packed(const float (&x)[kChunk], T) {
  return {pair(x[0], x[1], T{}), pair(x[2], x[3], T{}), pair(x[4], x[5], T{}),
          pair(x[6], x[7], T{})};
}

// The position of a chunk in the result, and whether the chunk is inside the result. The number of
// columns is a multiple of eight, so a chunk is either completely inside or completely outside.
struct ChunkAt {
  int64_t offset;  // in elements
  bool exists;
};

// The chunks of a lane. `offset` is the offset of the first chunk. `rows` and `columns` are the
// numbers of rows and columns from the first chunk to the end of the result.
struct Chunks {
  int64_t offset, stride;
  int rows, columns;

  template <class Params>
  __device__ Chunks(const Params& p, int row, int column)
      : offset(row * p.columns + column),
        stride(p.columns),
        rows(static_cast<int>(p.rows) - row),
        columns(static_cast<int>(p.columns) - column) {}

  __device__ ChunkAt at(int row, int column) const {
    return {offset + row * stride + column, row < rows && column < columns};
  }
};

inline __device__ void write_chunk(void* to, int64_t offset, const uint4& chunk) {
  __stcg(reinterpret_cast<uint4*>(static_cast<uint16_t*>(to) + offset), chunk);
}

// The epilogue of the forward, which computes a chunk of y from a chunk of the pre-activation.
template <class T, class Function>
struct StoreGelu {
  using Params = LinearGelu;
  static constexpr bool kReadsSaved = false;

  static __device__ void store(const Params& p, const ChunkAt& at, const uint4& chunk, const uint4&,
                               float (&)[kChunk]) {
    if (!at.exists) return;
    float x[kChunk];
    unpack(chunk, x, T{});
#pragma unroll
    for (float& element : x) element = Function::forward(element);
    if (p.h) write_chunk(p.h, at.offset, chunk);
    write_chunk(p.y, at.offset, packed(x, T{}));
  }
};

// The epilogue of the backward, which computes chunks of dh and of the activation `a` from chunks
// of da and h. `sums` adds up dh over the rows. Beyond the last row, da and h are 0, and therefore
// dh is 0.
template <class T, class Function>
struct StoreGradient {
  using Params = LinearGeluGradient;
  static constexpr bool kReadsSaved = true;

  static __device__ void store(const Params& p, const ChunkAt& at, const uint4& chunk,
                               const uint4& saved, float (&sums)[kChunk]) {
    float x[kChunk], h[kChunk];
    unpack(chunk, x, T{});
    unpack(saved, h, T{});
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      x[i] *= Function::derivative(h[i]);
      sums[i] += x[i];
      h[i] = Function::forward(h[i]);
    }
    if (!at.exists) return;
    write_chunk(p.dh, at.offset, packed(x, T{}));
    write_chunk(p.a, at.offset, packed(h, T{}));
  }
};

// Returns a chunk of the saved pre-activation, or zeros if the chunk is outside the result.
inline __device__ uint4 saved_chunk(const LinearGeluGradient& p, const ChunkAt& at) {
  if (!at.exists) return {0, 0, 0, 0};
  return __ldcg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.h) + at.offset));
}

// Adds the sums of lanes that have the same columns, and writes the totals in the order of the
// columns. Lanes have the same columns if their numbers differ by a multiple of kLanes. For each
// chunk, two lanes write one half each, so that there are no bank conflicts.
template <int kLanes>
__device__ void write_sums(float* to, float (&sums)[kChunk]) {
#pragma unroll
  for (float& sum : sums)
#pragma unroll
    for (int other = kLanes; other < 32; other *= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, other);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane >= 2 * kLanes) return;
  const int half = (lane / kLanes) ^ (lane / 4 % 2);
  const uint32_t at = shared_address(to + lane % kLanes * kChunk + half * 4);
  // The store is inline PTX, because nvcc would split the store of four floats into stores of
  // single floats.
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(half ? sums[4] : sums[0]),
               "f"(half ? sums[5] : sums[1]), "f"(half ? sums[6] : sums[2]),
               "f"(half ? sums[7] : sums[3])
               : "memory");
}

// The row and the column of a tile of the result, counted in tiles. tile_at returns them for the
// number of a tile. Eight rows of tiles form a group, whose tiles are numbered column by column.
// Therefore the tiles that are computed at the same time share rows of both operands, which are
// then read from the L2 cache.
struct TileAt {
  int row, column;
};

inline __device__ TileAt tile_at(int tile, int row_tiles, int column_tiles) {
  constexpr int kGroup = 8;
  const int group = tile / (kGroup * column_tiles), inside = tile % (kGroup * column_tiles);
  const int rows = min(kGroup, row_tiles - group * kGroup);
  return {group * kGroup + inside % rows, inside / rows};
}

}  // namespace fastbert::cuda
