// Sums over the threads that share a row, and over partial sums. Every sum is computed in a fixed
// order and without atomics, so repeated runs give the same bits.

#pragma once

#include <cuda_runtime.h>

#include "access.cuh"
#include "launch.cuh"

namespace fastbert::cuda {

struct Pair {
  float a, b;
};

// Returns the sum of x over the group of kThreads lanes of the calling lane, or over the warp if
// kThreads is above 32. All lanes of the warp must call this function together.
template <int kThreads>
__device__ float warp_sum(float x) {
  constexpr int kLanes = kThreads < 32 ? kThreads : 32;
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// The shared memory of one call of row_sum. Consecutive calls must alternate between two RowSums,
// so that one barrier for each call is enough.
template <int kThreads>
struct RowSums {
  Pair warp[kThreads > 32 ? kThreads / 32 : 1];
};

// Returns, to each of the kThreads threads of a row, the sums of p.a and p.b over these threads.
// Rows that take more than one warp do not wait for each other, because each row has its own
// barrier.
template <int kThreads>
__device__ Pair row_sum(Pair p, RowSums<kThreads>& shared) {
  p = {warp_sum<kThreads>(p.a), warp_sum<kThreads>(p.b)};
  if constexpr (kThreads <= 32) return p;
  if (threadIdx.x % 32 == 0) shared.warp[threadIdx.x % kThreads / 32] = p;
  asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / kThreads), "n"(kThreads) : "memory");
  Pair total = shared.warp[0];
#pragma unroll
  for (int i = 1; i < kThreads / 32; ++i) {
    total.a += shared.warp[i].a;
    total.b += shared.warp[i].b;
  }
  return total;
}

template <int kThreads>
__device__ float row_sum(float x, RowSums<kThreads>& shared) {
  if constexpr (kThreads <= 32) return warp_sum<kThreads>(x);
  return row_sum(Pair{x, 0.0f}, shared).a;
}

// out[n] = sum over i < count of partial[i][n]. `partial` is a (count, columns) matrix whose rows
// are `stride` elements apart, and `out` is written in `format`.
struct SumPartials {
  const float* partial;
  int64_t count, columns, stride;
  void* out;
  Format format;
};

cudaError_t sum_partials(const SumPartials& params, cudaStream_t stream);

}  // namespace fastbert::cuda
