// The running softmax of a tile of 64 x 128 scores in the registers of a group of four warps;
// ../softmax.cuh does the same for smaller tiles. One in eight exponentials is computed as a
// polynomial on the FMA units, because the special function units alone would take longer than the
// products. If more of them were polynomials, the issue of instructions would take longer than the
// products; README.md has the counts.

#pragma once

#include "../softmax.cuh"

namespace fastbert::cuda {

constexpr int kScores = 64;  // scores of a lane: two rows of 32 keys

// Returns 2^x for x <= 0 with a relative error of at most 3.1e-6. The result is exactly 1 for x =
// 0, and exactly 0 for x <= -127 and for -inf.
//
// x = n + f with an integer n and |f| <= 1/2 (Cody and Waite 1980); adding 1.5 * 2^23 rounds x to n
// and leaves n in the low bits of the sum. A minimax polynomial with the constant term 1
// approximates 2^f, and n is added to the exponent. For x = -127, 2^f is 1 and the bits of the
// result are those of 0.
inline __device__ float exp2_polynomial(float x) {
  x = fmaxf(x, -127.0f);
  const float shifted = x + 12582912.0f;
  const float f = x - (shifted - 12582912.0f);
  float y = 0x1.3a02ccp-7f;
  y = fmaf(y, f, 0x1.c9fc46p-5f);
  y = fmaf(y, f, 0x1.ec0378p-3f);
  y = fmaf(y, f, 0x1.62e12cp-1f);
  y = fmaf(y, f, 1.0f);
  return __int_as_float(__float_as_int(y) + (__float_as_int(shifted) << 23));
}

// The state of the softmax of the lane's two rows. With g = lane / 4, these are row g for half = 0
// and row g + 8 for half = 1.
struct TileSoftmax {
  float maximum[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};

  // Turns the raw scores of a row into weights, and returns the factor by which the caller must
  // multiply its sums over the earlier tiles. `factor` is scale * log2(e).
  __device__ float step(float (&scores)[kScores], int half, float factor) {
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 2 * half; i < kScores; i += 4) {
      largest[0] = fmaxf(largest[0], scores[i]);
      largest[1] = fmaxf(largest[1], scores[i + 1]);
    }
    const float before = maximum[half];
    maximum[half] = fmaxf(before, row_max(fmaxf(largest[0], largest[1])) * factor);
    const float reference = maximum[half] == -INFINITY ? 0.0f : maximum[half];
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 2 * half; i < kScores; i += 4) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float& score = scores[i + column];
        const float x = fmaf(score, factor, -reference);
        // One in eight exponentials of a row is computed as a polynomial.
        score = column == 1 && i / 4 % 4 == 3 ? exp2_polynomial(x) : exp2_fast(x);
        sum[column] += score;
      }
    }
    const float rescale = exp2_fast(before - reference);
    total[half] = fmaf(total[half], rescale, sum[0] + sum[1]);
    return rescale;
  }

  // Returns the log-sum-exp of a row as a natural logarithm, and sets `inverse` to 1 / sum. For a
  // row without an allowed key, the function returns -inf and sets `inverse` to 1.
  __device__ float finish(int half, float& inverse) const {
    const float sum = quad_sum(total[half]);
    inverse = sum == 0.0f ? 1.0f : __fdividef(1.0f, sum);
    return sum == 0.0f ? -INFINITY : (maximum[half] + log2f(sum)) * kLn2;
  }
};

}  // namespace fastbert::cuda
