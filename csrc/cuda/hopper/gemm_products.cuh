// Products of 64 rows and 256 columns of a tile, by a group of four warps, with both operands in
// shared memory. Each call adds the products of 16 columns of the left operand to each element of
// the result. wgmma.cuh explains the layouts.

#pragma once

#include "wgmma.cuh"

namespace fastbert::cuda {

#define FASTBERT_NAMES_128                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, "                 \
  "%8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, "         \
  "%24, %25, %26, %27, %28, %29, %30, %31, "         \
  "%32, %33, %34, %35, %36, %37, %38, %39, "         \
  "%40, %41, %42, %43, %44, %45, %46, %47, "         \
  "%48, %49, %50, %51, %52, %53, %54, %55, "         \
  "%56, %57, %58, %59, %60, %61, %62, %63, "         \
  "%64, %65, %66, %67, %68, %69, %70, %71, "         \
  "%72, %73, %74, %75, %76, %77, %78, %79, "         \
  "%80, %81, %82, %83, %84, %85, %86, %87, "         \
  "%88, %89, %90, %91, %92, %93, %94, %95, "         \
  "%96, %97, %98, %99, %100, %101, %102, %103, "     \
  "%104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"

#define FASTBERT_SUMS_8(i)                                                                   \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), \
      "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define FASTBERT_SUMS_32(i) \
  FASTBERT_SUMS_8(i), FASTBERT_SUMS_8(i + 8), FASTBERT_SUMS_8(i + 16), FASTBERT_SUMS_8(i + 24)
#define FASTBERT_SUMS_128 \
  FASTBERT_SUMS_32(0), FASTBERT_SUMS_32(32), FASTBERT_SUMS_32(64), FASTBERT_SUMS_32(96)

// multiply(sums, left, right) computes sums += left right^T, where right has 256 rows.
//
// multiply_rows(sums, left, right) computes sums += left right, where right has 256 columns.
#define FASTBERT_PRODUCT(NAME, T, TYPE, TRANSPOSED)                                            \
  __forceinline__ __device__ void NAME(float (&sums)[128], uint64_t left, uint64_t right, T) { \
    asm volatile(                                                                              \
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                             \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" FASTBERT_NAMES_128   \
        "}, %128, %129, p, 1, 1, 0, " TRANSPOSED ";\n}"                                        \
        : FASTBERT_SUMS_128                                                                    \
        : "l"(left), "l"(right));                                                              \
  }

FASTBERT_PRODUCT(multiply, __half, "f16", "0")
FASTBERT_PRODUCT(multiply, __nv_bfloat16, "bf16", "0")
FASTBERT_PRODUCT(multiply_rows, __half, "f16", "1")
FASTBERT_PRODUCT(multiply_rows, __nv_bfloat16, "bf16", "1")

#undef FASTBERT_PRODUCT
#undef FASTBERT_SUMS_128
#undef FASTBERT_SUMS_32
#undef FASTBERT_SUMS_8
#undef FASTBERT_NAMES_128

}  // namespace fastbert::cuda
