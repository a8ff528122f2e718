// The part of the CUDA runtime that a compiled .cu file needs, without a GPU: kernels are known by
// the names that nvcc registers, and a launch calls back with the kernel's name and arguments.

#include <cuda_runtime.h>

#include <map>
#include <string>

namespace {

using Callback = int (*)(const char* kernel, const unsigned* grid, const unsigned* block,
                         void** args, unsigned long long shared);
Callback callback = nullptr;
std::map<const void*, std::string>& kernels() {
  static std::map<const void*, std::string> names;
  return names;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local Configuration configuration;

}  // namespace

extern "C" {

void fastbert_ptx_on_launch(Callback function) { callback = function; }

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* device, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  kernels()[host] = device;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args, size_t shared,
                             cudaStream_t) {
  const auto found = kernels().find(kernel);
  if (found == kernels().end() || callback == nullptr) return cudaErrorInvalidDeviceFunction;
  const unsigned sizes[] = {grid.x, grid.y, grid.z, block.x, block.y, block.z};
  return callback(found->second.c_str(), sizes, sizes + 3, args, shared) ? cudaErrorLaunchFailure
                                                                         : cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** args) {
  return cudaLaunchKernel(kernel, config->gridDim, config->blockDim, args, config->dynamicSmemBytes,
                          config->stream);
}
cudaError_t __cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args,
                               size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* entry) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(entry));
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount                ? 132
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin     ? 227 * 1024
           : attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? 228 * 1024
                                                                      : 0;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "error of the PTX machine"; }

}  // extern "C"
