// Launches a kernel that takes one params struct by value. `launch` returns the error of the
// launch, which cuda_ops.cpp raises as an exception. If the grid is empty, `launch` launches
// nothing, because CUDA would return an error.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fastbert::cuda {

// The largest size of a grid in y. If there are more rows, each block of a kernel computes several
// rows.
constexpr int64_t kMaxGridY = 65535;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class Params>
cudaError_t launch(void (*kernel)(Params), dim3 grid, int threads, const Params& params,
                   cudaStream_t stream, int dynamic_shared = 0) {
  if (grid.x == 0 || grid.y == 0) return cudaSuccess;
  const void* const function = reinterpret_cast<const void*>(kernel);
  // A block may use more than 48 KiB of shared memory only if the launcher requests it. Smaller
  // sizes are requested, too, because static shared memory also counts, and its size is not known
  // here. Each kernel always requests the same size, so concurrent CPU threads do not request
  // different sizes.
  if (dynamic_shared > 0) {
    const cudaError_t error =
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_shared);
    if (error != cudaSuccess) return error;
  }
  Params copy = params;
  void* arguments[] = {&copy};
  return cudaLaunchKernel(function, grid, dim3(threads), arguments, dynamic_shared, stream);
}

}  // namespace fastbert::cuda
