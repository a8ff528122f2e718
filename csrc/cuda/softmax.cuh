// The running softmax of a tile of scores in the registers of a warp (Milakov and Gimelshein 2018;
// Dao 2023). Of every 16 rows, a lane holds elements of rows g and g + 8, with g = lane / 4.

#pragma once

#include <cuda_runtime.h>

namespace fastbert::cuda {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Returns 2^x with an error of at most 2 units in the last place; 0 for -inf.
inline __device__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// row_max and quad_sum combine the values of the four lanes that share a row.
inline __device__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

inline __device__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The state of one row. The scaled scores are the raw scores times scale * log2(e). `maximum` is
// the largest scaled score, and `total` is the lane's share of the sum of 2^(scaled score -
// maximum).
//
// The caller must first call `clear` on each state of an array, because the members have no default
// values. In an array of arrays, nvcc 13.0 would give default values to the first inner array only,
// and 0 to all others.
struct RowState {
  float maximum, total;

  __device__ void clear() {
    maximum = -INFINITY;
    total = 0.0f;
  }

  // Turns the lane's raw scores of the row into weights, and returns the factor by which the caller
  // must multiply its sums over the earlier tiles. `factor` is scale * log2(e). In a row without an
  // allowed key, all scores are -inf.
  template <int kColumns>
  __device__ float step(float (&scores)[kColumns][4], int half, float factor) {
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      largest = fmaxf(largest, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
    const float before = maximum;
    maximum = fmaxf(before, row_max(largest) * factor);
    const float reference = maximum == -INFINITY ? 0.0f : maximum;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = scores[j][2 * half + i];
        score = exp2_fast(fmaf(score, factor, -reference));
        sum += score;
      }
    }
    const float rescale = exp2_fast(before - reference);
    total = fmaf(total, rescale, sum);
    return rescale;
  }

  // Returns the log-sum-exp of the row as a natural logarithm, and sets `inverse` to 1 / sum. For a
  // row without an allowed key, the function returns -inf and sets `inverse` to 1.
  __device__ float finish(float& inverse) {
    const float sum = quad_sum(total);
    inverse = sum == 0.0f ? 1.0f : __fdividef(1.0f, sum);
    return sum == 0.0f ? -INFINITY : (maximum + log2f(sum)) * kLn2;
  }
};

}  // namespace fastbert::cuda
