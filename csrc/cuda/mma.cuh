// Products of 16-bit operands on the matrix units of Ampere and later GPUs, one warp at a time.
//
// A fragment is the part of a matrix that a lane holds in registers. The PTX manual defines the
// layouts (Matrix Fragments for mma.m16n8k16). With g = lane / 4 and t = lane % 4:
//   sums (16 x 8): rows g, g, g + 8, g + 8 and columns 2t, 2t + 1, 2t, 2t + 1
//   left operand (16 x 16): pairs of columns 2t and 2t + 8, each for the rows g and g + 8
//   right operand (16 x 8): pairs of rows 2t and 2t + 8 of column g
// So the sums of two neighbouring products are the left operand of the next product, which is how
// the softmax weights go from Q K^T to P V without leaving the registers.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fastbert::cuda {

struct LeftFragment {
  uint32_t pairs[4];
};

struct RightFragment {
  uint32_t pairs[2];
};

// sums += left * right
inline __device__ void multiply(float (&sums)[4], const LeftFragment& left,
                                const RightFragment& right, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left.pairs[0]), "r"(left.pairs[1]), "r"(left.pairs[2]), "r"(left.pairs[3]),
        "r"(right.pairs[0]), "r"(right.pairs[1]));
}

inline __device__ void multiply(float (&sums)[4], const LeftFragment& left,
                                const RightFragment& right, __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left.pairs[0]), "r"(left.pairs[1]), "r"(left.pairs[2]), "r"(left.pairs[3]),
        "r"(right.pairs[0]), "r"(right.pairs[1]));
}

// Rounds two floats to a pair of 16-bit elements. `low` becomes the element of the lower column.
inline __device__ uint32_t pair(float low, float high, __half) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

inline __device__ uint32_t pair(float low, float high, __nv_bfloat16) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// Loads four 8 x 8 matrices from shared memory. Lane i gives the address of row i % 8 of matrix i /
// 8. With g = lane / 4 and t = lane % 4, a lane receives columns 2t and 2t + 1 of row g of each
// matrix.
inline __device__ void load_matrices(uint32_t (&pairs)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
               : "r"(address)
               : "memory");
}

// Like load_matrices, but each matrix is transposed: a lane receives rows 2t and 2t + 1 of column
// g.
inline __device__ void load_transposed_matrices(uint32_t (&pairs)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
               : "r"(address)
               : "memory");
}

}  // namespace fastbert::cuda
