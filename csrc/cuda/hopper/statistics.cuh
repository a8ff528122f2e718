// The statistics of each query of a tile that the backward of attention needs: the log-sum-exp, and
// delta, which is the sum of dout * out.

#pragma once

#include "../access.cuh"
#include "tma.cuh"

namespace fastbert::cuda {

constexpr int kTileQueries = 64;  // queries of a tile in the backward

// The statistics of a tile, in shared memory. `logarithm` is the log-sum-exp in base 2. It is +inf
// for a query that attends no key or is beyond the end of the sequence.
struct Statistics {
  float logarithm[kTileQueries], delta[kTileQueries];
};

// Returns delta of row `first` + lane, from a tile of dout and a tile of out in the layout of
// tma.cuh. All lanes of a warp call this function. Neighbouring lanes share a row: each of them
// reads one chunk of 16 bytes from each part of the row.
template <class T, int kHeadDim>
__device__ float delta_of(const unsigned char* dout, const unsigned char* out, int first) {
  using Row = BoxRow<kHeadDim>;
  constexpr int kSharers = Row::kChunks, kRows = 32 / kSharers;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float delta = 0.0f;
#pragma unroll 1
  for (int i = 0; i < 32 / kRows; ++i) {
    const int row = first + kRows * i + lane / kSharers;
    // A chunk of columns is at the same place in both tiles, so the order of the chunks does not
    // matter.
    const int at = row * Row::kBytes + lane % kSharers * 16;
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < Row::kParts; ++part) {
      const int of_part = part * kTileQueries * Row::kBytes + at;
      const Pack<T, kWidth<T>> a = *reinterpret_cast<const Pack<T, kWidth<T>>*>(dout + of_part);
      const Pack<T, kWidth<T>> b = *reinterpret_cast<const Pack<T, kWidth<T>>*>(out + of_part);
#pragma unroll
      for (int e = 0; e < kWidth<T>; ++e) sum += to_float(a.values[e]) * to_float(b.values[e]);
    }
#pragma unroll
    for (int bit = 1; bit < kSharers; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
    const float of_group = __shfl_sync(0xffffffffu, sum, kSharers * (lane % kRows));
    if (lane / kRows == i) delta = of_group;
  }
  return delta;
}

}  // namespace fastbert::cuda
