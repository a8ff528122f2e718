// Gives the launchers access to functions of the CUDA driver. The CUDA runtime looks up these
// functions, so that the extension need not be linked with libcuda.

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace fastbert::cuda {

// Returns the driver's function called `name`, or nullptr if the driver has no such function.
inline void* driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
}

// Binds the context of the current device to the calling thread, as the driver's functions require.
// Few functions of the CUDA runtime bind the context, and an autograd thread may have called none
// of them.
inline cudaError_t bind_context() {
  thread_local int bound = -1;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess || device == bound) return error;
  error = cudaSetDevice(device);
  if (error == cudaSuccess) bound = device;
  return error;
}

// Converts `result`, which a function of the driver returned, to the error of the CUDA runtime that
// has the same number.
inline cudaError_t error_of(CUresult result) {
  static_assert(static_cast<int>(CUDA_SUCCESS) == static_cast<int>(cudaSuccess) &&
                static_cast<int>(CUDA_ERROR_INVALID_CONTEXT) ==
                    static_cast<int>(cudaErrorDeviceUninitialized));
  return static_cast<cudaError_t>(result);
}

// Returns the driver's name of an error, such as "CUDA_ERROR_INVALID_CONTEXT", or nullptr if the
// driver has no such error.
inline const char* driver_name(cudaError_t error) {
  using GetName = CUresult (*)(CUresult, const char**);
  static const auto get_name = reinterpret_cast<GetName>(driver_function("cuGetErrorName"));
  const char* name = nullptr;
  if (get_name == nullptr || get_name(static_cast<CUresult>(error), &name) != CUDA_SUCCESS)
    return nullptr;
  return name;
}

}  // namespace fastbert::cuda
