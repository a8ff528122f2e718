// Sums over the threads that share a row, and over partial sums. Every sum has a fixed order and no
// atomics, so reruns agree bit for bit.

#pragma once

#include <cuda_runtime.h>

#include "access.cuh"
#include "launch.cuh"

namespace fastbert::cuda {

struct Pair {
  float a, b;
};

inline __device__ Pair warp_sum(Pair p) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    p.a += __shfl_xor_sync(0xffffffffu, p.a, offset);
    p.b += __shfl_xor_sync(0xffffffffu, p.b, offset);
  }
  return p;
}

// The shared memory of one row_sum. Consecutive sums alternate between two RowSums, which saves a
// barrier.
template <int kThreads>
struct RowSums {
  Pair warp[kThreads / 32];
};

// Returns the sums over the kThreads threads of a row to each of these threads.
template <int kThreads>
__device__ Pair row_sum(Pair p, RowSums<kThreads>& shared) {
  p = warp_sum(p);
  if (kThreads == 32) return p;
  if (threadIdx.x % 32 == 0) shared.warp[threadIdx.x / 32] = p;
  __syncthreads();
  Pair total = shared.warp[0];
#pragma unroll
  for (int i = 1; i < kThreads / 32; ++i) {
    total.a += shared.warp[i].a;
    total.b += shared.warp[i].b;
  }
  return total;
}

// out[n] = sum over i < count of partial[i][n]. `partial` is a (count, columns) matrix, and `out`
// is written in `format`.
struct SumPartials {
  const float* partial;
  int64_t count, columns, stride;
  void* out;
  Format format;
};

cudaError_t sum_partials(const SumPartials& params, cudaStream_t stream);

}  // namespace fastbert::cuda
