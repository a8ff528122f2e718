// The part of the CUDA runtime that a compiled .cu file needs, without a GPU: kernels are known by
// the names that nvcc registers, and a launch calls back with the kernel's name and arguments.

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
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

// The GPU that the launchers see.
struct Device {
  int capability = 80, multiprocessors = 132;
} device;

// A tensor map as fastbert/testing/ptx/tensor_map.py lays it out.
struct TensorMap {
  char magic[4];
  uint8_t rank, element_bytes, swizzle, fill_nan;
  uint64_t address;
  uint32_t size[5], type;
  uint64_t stride[4];
  uint16_t box[5];
};

CUresult encode(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* address,
                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  // By the driver's number of a type: its number in .elemtype of tensormap.replace, and its bytes.
  static const uint8_t types[][2] = {{0, 1}, {1, 2}, {2, 4},  {3, 4}, {4, 8},  {5, 8}, {6, 2},
                                     {7, 4}, {9, 8}, {10, 2}, {8, 4}, {11, 4}, {12, 4}};
  if (rank < 1 || rank > 5 || type > 12 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      swizzle > CU_TENSOR_MAP_SWIZZLE_128B || reinterpret_cast<uintptr_t>(address) % 16)
    return CUDA_ERROR_INVALID_VALUE;
  TensorMap map = {{'f', 'b', 't', 'm'}, (uint8_t)rank, types[type][1], 0, 0, 0, {}, 0, {}, {}};
  map.swizzle = swizzle ? (uint8_t)(16 << swizzle) : 0;
  map.fill_nan = fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  map.address = reinterpret_cast<uintptr_t>(address);
  map.type = types[type][0];
  for (cuuint32_t d = 0; d < rank; ++d) {
    if (element_strides[d] != 1 || box[d] < 1 || box[d] > 256) return CUDA_ERROR_INVALID_VALUE;
    if (d && strides[d - 1] % 16) return CUDA_ERROR_INVALID_VALUE;
    map.size[d] = (uint32_t)sizes[d], map.box[d] = (uint16_t)box[d];
    if (d) map.stride[d - 1] = strides[d - 1];
  }
  if (box[0] * map.element_bytes % 16 || (map.swizzle && box[0] * map.element_bytes > map.swizzle))
    return CUDA_ERROR_INVALID_VALUE;
  std::memset(to, 0, sizeof(*to));
  std::memcpy(to, &map, sizeof(map));
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

void fastbert_ptx_on_launch(Callback function) { callback = function; }
void fastbert_ptx_set_device(int capability, int multiprocessors) {
  device = {capability, multiprocessors};
}

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
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(encode) : nullptr;
  if (result) *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return known ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int* number) { return *number = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount                ? device.multiprocessors
           : attribute == cudaDevAttrComputeCapabilityMajor           ? device.capability / 10
           : attribute == cudaDevAttrComputeCapabilityMinor           ? device.capability % 10
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin     ? 227 * 1024
           : attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? 228 * 1024
                                                                      : 0;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "error of the PTX machine"; }

}  // extern "C"
