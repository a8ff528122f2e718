// Products of 16-bit operands on the matrix units of Hopper (wgmma), by a group of four warps.
//
// The sums of a group are 64 rows; warp w of the group holds rows 16 w to 16 w + 15. With g = lane
// / 4 and t = lane % 4, a lane holds four sums of every 8 columns: columns 2t and 2t + 1 of row g,
// and then of row g + 8. The left operand in registers has the layout of mma.cuh, so the sums of 16
// columns are the left operand of the next product.
//
// A product runs asynchronously. The registers of its sums and of its left operand may not be
// accessed before wait_for_products. begin_products must be called before the first of a group of
// products, and after the last access to these registers.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fastbert::cuda {

// Returns the descriptor of an operand in the layout of tma.cuh, with rows of 128 or 64 bytes.
// Groups of eight rows are stored one after the other. `halves` is the distance in bytes between
// successive parts of 64 columns in the right operand of accumulate_rows or multiply_rows.
template <int kRowBytes = 128>
__device__ uint64_t descriptor(uint32_t address, uint32_t halves = 16) {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
  return kSwizzle << 62 | static_cast<uint64_t>(8 * kRowBytes / 16) << 32 |
         static_cast<uint64_t>(halves / 16) << 16 | (address & 0x3ffff) / 16;
}

// Returns the descriptor of an operand that begins `bytes` bytes after the operand of `descriptor`.
inline __device__ uint64_t moved(uint64_t descriptor, int bytes) { return descriptor + bytes / 16; }

// Returns x, which must be the same in all lanes of a warp. ptxas knows that this result is the
// same in all lanes. Therefore counters and addresses that depend on it stay in uniform registers,
// which wgmma requires for its descriptors.
inline __device__ int uniform(int x) {
  return static_cast<int>(__reduce_or_sync(0xffffffffu, static_cast<unsigned>(x)));
}

inline __device__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
inline __device__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending groups of products are unfinished.
template <int kPending>
__device__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving an access to the registers of `x` across this call.
template <int kCount>
__device__ void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kCount>
__device__ void pin(uint32_t (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// Tells the compiler that the values in the registers of `x` are no longer needed, so that it need
// not preserve them until a product overwrites `x`.
template <int kCount>
__device__ void discard(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(x[i])::"memory");
}

#define FASTBERT_NAMES_16            \
  "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define FASTBERT_NAMES_32                    \
  FASTBERT_NAMES_16                          \
  ", "                                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define FASTBERT_NAMES_64                    \
  FASTBERT_NAMES_32                          \
  ", "                                       \
  "%32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define FASTBERT_SUMS_8(i)                                                                   \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), \
      "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define FASTBERT_SUMS_16 FASTBERT_SUMS_8(0), FASTBERT_SUMS_8(8)
#define FASTBERT_SUMS_32 FASTBERT_SUMS_16, FASTBERT_SUMS_8(16), FASTBERT_SUMS_8(24)
#define FASTBERT_SUMS_64                                                           \
  FASTBERT_SUMS_32, FASTBERT_SUMS_8(32), FASTBERT_SUMS_8(40), FASTBERT_SUMS_8(48), \
      FASTBERT_SUMS_8(56)

// multiply(sums, left, right, accumulate) computes sums = left right^T, or sums += left right^T
// with `accumulate`, over 16 columns of both operands. `right` is in shared memory and has 64 or
// 128 rows. `left` is in registers or in shared memory.
//
// accumulate_rows(sums, left, right) computes sums += left right over 16 rows of `right`, which is
// in shared memory and has 32, 64 or 128 columns. `left` is in registers.
//
// multiply_rows(sums, left, right, accumulate) computes sums = left^T right, or sums += left^T
// right with `accumulate`, over 16 rows of both operands. Both are in shared memory; `left` has 64
// columns, and `right` has 32 or 64.
#define FASTBERT_PRODUCTS(T, TYPE)                                                                \
  __forceinline__ __device__ void multiply(float (&sums)[64], uint64_t left, uint64_t right,      \
                                           int accumulate, T) {                                   \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                              \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" FASTBERT_NAMES_64       \
        "}, %64, %65, p, 1, 1, 0, 0;\n}"                                                          \
        : FASTBERT_SUMS_64                                                                        \
        : "l"(left), "l"(right), "r"(accumulate));                                                \
  }                                                                                               \
  __forceinline__ __device__ void multiply(float (&sums)[32], uint64_t left, uint64_t right,      \
                                           int accumulate, T) {                                   \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                              \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" FASTBERT_NAMES_32        \
        "}, %32, %33, p, 1, 1, 0, 0;\n}"                                                          \
        : FASTBERT_SUMS_32                                                                        \
        : "l"(left), "l"(right), "r"(accumulate));                                                \
  }                                                                                               \
  __forceinline__ __device__ void multiply(float (&sums)[32], const uint32_t* left,               \
                                           uint64_t right, int accumulate, T) {                   \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                              \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" FASTBERT_NAMES_32        \
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"                                            \
        : FASTBERT_SUMS_32                                                                        \
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(accumulate));   \
  }                                                                                               \
  __forceinline__ __device__ void multiply_rows(float (&sums)[16], uint64_t left, uint64_t right, \
                                                int accumulate, T) {                              \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"                                              \
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" FASTBERT_NAMES_16        \
        "}, %16, %17, p, 1, 1, 1, 1;\n}"                                                          \
        : FASTBERT_SUMS_16                                                                        \
        : "l"(left), "l"(right), "r"(accumulate));                                                \
  }                                                                                               \
  __forceinline__ __device__ void multiply_rows(float (&sums)[32], uint64_t left, uint64_t right, \
                                                int accumulate, T) {                              \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                              \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" FASTBERT_NAMES_32        \
        "}, %32, %33, p, 1, 1, 1, 1;\n}"                                                          \
        : FASTBERT_SUMS_32                                                                        \
        : "l"(left), "l"(right), "r"(accumulate));                                                \
  }                                                                                               \
  __forceinline__ __device__ void accumulate_rows(float (&sums)[16], const uint32_t* left,        \
                                                  uint64_t right, T) {                            \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                \
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" FASTBERT_NAMES_16        \
        "}, {%16, %17, %18, %19}, %20, p, 1, 1, 1;\n}"                                            \
        : FASTBERT_SUMS_16                                                                        \
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));                    \
  }                                                                                               \
  __forceinline__ __device__ void accumulate_rows(float (&sums)[32], const uint32_t* left,        \
                                                  uint64_t right, T) {                            \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" FASTBERT_NAMES_32        \
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"                                            \
        : FASTBERT_SUMS_32                                                                        \
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));                    \
  }                                                                                               \
  __forceinline__ __device__ void accumulate_rows(float (&sums)[64], const uint32_t* left,        \
                                                  uint64_t right, T) {                            \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" FASTBERT_NAMES_64       \
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"                                            \
        : FASTBERT_SUMS_64                                                                        \
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));                    \
  }

FASTBERT_PRODUCTS(__half, "f16")
FASTBERT_PRODUCTS(__nv_bfloat16, "bf16")

#undef FASTBERT_PRODUCTS
#undef FASTBERT_SUMS_64
#undef FASTBERT_SUMS_32
#undef FASTBERT_SUMS_16
#undef FASTBERT_SUMS_8
#undef FASTBERT_NAMES_64
#undef FASTBERT_NAMES_32
#undef FASTBERT_NAMES_16

}  // namespace fastbert::cuda
