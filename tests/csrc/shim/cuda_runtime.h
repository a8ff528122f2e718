// As much of the CUDA language as fastbert's kernels use, for g++: a block's threads are fibers of
// one CPU thread, switched at barriers and shuffles. What a GPU would leave undefined (a barrier
// that part of the block never reaches, a shuffle with an absent lane) aborts.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __host__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  explicit dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline void __stcg(uint4* to, uint4 value) { *to = value; }

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
using cudaStream_t = void*;

extern dim3 threadIdx, blockIdx, gridDim;

void __syncthreads();
float __shfl_xor_sync(unsigned mask, float value, int lane_mask);
inline float __fmul_rn(float a, float b) { return a * b; }

// Runs `body` once per thread of every block of the grid.
void run_grid(dim3 grid, int threads, const std::function<void()>& body);
