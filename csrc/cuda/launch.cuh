// The launch of a kernel that takes one params struct by value. `launch` returns the error of the
// launch, which cuda_ops.cpp raises as an exception. An empty grid launches nothing, because CUDA
// refuses it.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fastbert::cuda {

// The largest grid in y. A kernel strides over the rows beyond it.
constexpr int64_t kMaxGridY = 65535;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class Params>
cudaError_t launch(void (*kernel)(Params), dim3 grid, int threads, const Params& params,
                   cudaStream_t stream, int dynamic_shared = 0) {
  if (grid.x == 0 || grid.y == 0) return cudaSuccess;
  const void* const function = reinterpret_cast<const void*>(kernel);
  // A block may have more than 48 KiB only on request. Static memory counts too, which this
  // function does not know. Each kernel has one size, so no other thread asks for another.
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
