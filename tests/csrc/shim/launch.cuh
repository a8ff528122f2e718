// Takes the place of csrc/cuda/launch.cuh: a launch runs the grid on the spot.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fastbert::cuda {

constexpr int64_t kMaxGridY = 65535;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class Params>
cudaError_t launch(void (*kernel)(Params), dim3 grid, int threads, const Params& params,
                   cudaStream_t) {
  run_grid(grid, threads, [&] { kernel(params); });
  return cudaSuccess;
}

}  // namespace fastbert::cuda
