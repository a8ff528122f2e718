// Attributes of the current device that the launchers need.

#pragma once

#include <cuda_runtime.h>

namespace fastbert::cuda {

inline int attribute(cudaDeviceAttr name) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, name, device);
  return value;
}

}  // namespace fastbert::cuda
