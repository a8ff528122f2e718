// The part of the CUDA runtime that a compiled .cu file needs, without a GPU: kernels are known by
// the names that nvcc registers, and a launch calls back with the kernel's name and arguments.
// Launches and calls that a GPU's runtime refuses are refused here with the same error.

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <string>

namespace {

using OnLaunch = int (*)(const char* kernel, const unsigned* grid, const unsigned* cluster,
                         const unsigned* block, void** args, unsigned long long shared);
using Bounds = void (*)(const char* kernel, size_t* static_shared, size_t* most_threads,
                        unsigned* cluster);
OnLaunch on_launch = nullptr;
Bounds bounds_of = nullptr;

// A kernel, with the limits that its PTX sets for launches. The limits are requested once.
struct Kernel {
  std::string name;
  bool has_bounds = false;
  size_t static_shared = 0;
  size_t most_threads = 1024;
  unsigned cluster[3] = {};   // blocks of a cluster that the kernel requires, or zeros
  size_t dynamic_shared = 0;  // limit of a launch in bytes, if it was set
  bool has_dynamic_shared = false;
};
std::map<const void*, Kernel>& kernels() {
  static std::map<const void*, Kernel> found;
  return found;
}

// Returns the kernel of a host function, with the limits from its PTX, or null if the function has
// no kernel.
Kernel* find(const void* function) {
  const auto found = kernels().find(function);
  if (found == kernels().end()) return nullptr;
  Kernel& kernel = found->second;
  if (!kernel.has_bounds && bounds_of)
    bounds_of(kernel.name.c_str(), &kernel.static_shared, &kernel.most_threads, kernel.cluster);
  kernel.has_bounds = true;
  return &kernel;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local Configuration configuration;

// The GPU that the launchers see, and what it allows; cuda_library.py takes the limits from
// ptxmachine/limits.py.
struct Device {
  uint64_t capability, multiprocessors;
  uint64_t default_shared, most_shared;  // bytes of a block: by default, and with an attribute
  uint64_t threads;                      // of a block
  uint64_t block[3], grid[3];            // threads and blocks in x, y and z
  uint64_t cluster;                      // blocks of a cluster
  uint64_t box, stride_end;              // of a tensor map: largest side of a box, limit of strides
} device;

// Whether a context is current in the calling thread. The driver's functions need a context.
thread_local bool has_context = false;

// Returns the error of a launch that a GPU cannot run, or cudaSuccess.
cudaError_t refusal(const Kernel& kernel, dim3 grid, dim3 cluster, dim3 block, size_t shared) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const unsigned blocks[] = {grid.x, grid.y, grid.z}, sizes[] = {block.x, block.y, block.z};
  for (int d = 0; d < 3; ++d)
    if (blocks[d] < 1 || blocks[d] > device.grid[d] || sizes[d] < 1 || sizes[d] > device.block[d])
      return cudaErrorInvalidConfiguration;
  if (threads > device.threads) return cudaErrorInvalidConfiguration;
  if (threads > kernel.most_threads) return cudaErrorLaunchOutOfResources;
  const unsigned together[] = {cluster.x, cluster.y, cluster.z};
  if (uint64_t{cluster.x} * cluster.y * cluster.z > device.cluster)
    return cudaErrorInvalidClusterSize;
  for (int d = 0; d < 3; ++d)
    if (together[d] < 1 || blocks[d] % together[d] ||
        (kernel.cluster[0] && together[d] != kernel.cluster[d]))
      return cudaErrorInvalidClusterSize;
  const size_t most = kernel.has_dynamic_shared ? kernel.dynamic_shared + kernel.static_shared
                                                : device.default_shared;
  return kernel.static_shared + shared > most ? cudaErrorInvalidValue : cudaSuccess;
}

// The alignment in bytes that the driver requires of a tensor map. The type CUtensorMap has a
// larger alignment.
constexpr uintptr_t kMapAlignment = 64;

// A tensor map as ptxmachine/src/ptxmachine/tensor_map.py lays it out.
struct TensorMap {
  char magic[4];
  uint8_t rank, element_bytes, swizzle, fill_nan;
  uint64_t address;
  uint32_t size[5], type;
  uint64_t stride[4];
  uint16_t box[5];
};

CUresult get_error_name(CUresult error, const char** name) {
  *name = error == CUDA_SUCCESS                 ? "CUDA_SUCCESS"
          : error == CUDA_ERROR_INVALID_VALUE   ? "CUDA_ERROR_INVALID_VALUE"
          : error == CUDA_ERROR_INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
                                                : nullptr;
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult encode(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* address,
                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  // The entry of a CUtensorMapDataType has the number of the type in .elemtype of
  // tensormap.replace, and the size of an element in bytes.
  static const uint8_t types[][2] = {{0, 1}, {1, 2}, {2, 4},  {3, 4}, {4, 8},  {5, 8}, {6, 2},
                                     {7, 4}, {9, 8}, {10, 2}, {8, 4}, {11, 4}, {12, 4}};
  if (rank < 1 || rank > 5 || type > 12 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      swizzle > CU_TENSOR_MAP_SWIZZLE_128B || reinterpret_cast<uintptr_t>(address) % 16 ||
      reinterpret_cast<uintptr_t>(to) % kMapAlignment)
    return CUDA_ERROR_INVALID_VALUE;
  const bool is_float = type >= CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if (fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && !is_float) return CUDA_ERROR_INVALID_VALUE;
  TensorMap map = {{'p', 't', 'x', 'm'}, (uint8_t)rank, types[type][1], 0, 0, 0, {}, 0, {}, {}};
  map.swizzle = swizzle ? (uint8_t)(16 << swizzle) : 0;
  map.fill_nan = fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  map.address = reinterpret_cast<uintptr_t>(address);
  map.type = types[type][0];
  for (cuuint32_t d = 0; d < rank; ++d) {
    if (element_strides[d] != 1 || box[d] < 1 || box[d] > device.box)
      return CUDA_ERROR_INVALID_VALUE;
    if (sizes[d] < 1 || sizes[d] > UINT32_MAX) return CUDA_ERROR_INVALID_VALUE;
    if (d && (strides[d - 1] % 16 || strides[d - 1] >= device.stride_end))
      return CUDA_ERROR_INVALID_VALUE;
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

void fastbert_ptx_set_callbacks(OnLaunch launch, Bounds bounds) {
  on_launch = launch, bounds_of = bounds;
}
void fastbert_ptx_set_device(const Device* given) { device = *given; }

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* device, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  kernels()[host].name = device;
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

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** args) {
  const Kernel* found = find(kernel);
  if (!found || !on_launch) return cudaErrorInvalidDeviceFunction;
  has_context = true;
  const dim3 grid = config->gridDim, block = config->blockDim;
  dim3 cluster(1, 1, 1);
  if (found->cluster[0]) cluster = {found->cluster[0], found->cluster[1], found->cluster[2]};
  for (unsigned n = 0; n < config->numAttrs; ++n) {
    const cudaLaunchAttribute& attribute = config->attrs[n];
    const auto& given = attribute.val.clusterDim;
    if (attribute.id == cudaLaunchAttributeClusterDimension) cluster = {given.x, given.y, given.z};
  }
  const cudaError_t refused = refusal(*found, grid, cluster, block, config->dynamicSmemBytes);
  if (refused != cudaSuccess) return refused;
  const unsigned grids[] = {grid.x, grid.y, grid.z}, blocks[] = {block.x, block.y, block.z};
  const unsigned clusters[] = {cluster.x, cluster.y, cluster.z};
  const int fault =
      on_launch(found->name.c_str(), grids, clusters, blocks, args, config->dynamicSmemBytes);
  return fault ? cudaErrorLaunchFailure : cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args, size_t shared,
                             cudaStream_t) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared;
  return cudaLaunchKernelExC(&config, kernel, args);
}
cudaError_t __cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args,
                               size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* entry) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(entry));
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  Kernel* kernel = find(function);
  if (!kernel) return cudaErrorInvalidDeviceFunction;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || kernel->static_shared + static_cast<size_t>(value) > device.most_shared)
    return cudaErrorInvalidValue;
  kernel->dynamic_shared = static_cast<size_t>(value);
  kernel->has_dynamic_shared = true;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> known = {
      {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(encode)},
      {"cuGetErrorName", reinterpret_cast<void*>(get_error_name)}};
  const auto found = known.find(symbol);
  const bool exists = found != known.end();
  *function = exists ? found->second : nullptr;
  if (result) *result = exists ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return exists ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
// Only cudaSetDevice and the launch of a kernel make a context current in a thread.
cudaError_t cudaSetDevice(int number) {
  if (number != 0) return cudaErrorInvalidDevice;
  has_context = true;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* number) { return *number = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount                ? (int)device.multiprocessors
           : attribute == cudaDevAttrComputeCapabilityMajor           ? (int)device.capability / 10
           : attribute == cudaDevAttrComputeCapabilityMinor           ? (int)device.capability % 10
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin     ? (int)device.most_shared
           : attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? 228 * 1024
                                                                      : 0;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "error of the PTX machine"; }

}  // extern "C"
