// This file is a mock of the CUDA driver, with the functions of libcuda that Triton's launcher
// calls.
//
// The library is named libcuda.so.1. A kernel is loaded but never executed: cuLaunchKernelEx counts
// the launch and returns. All code above the driver is real, so the CPU time of a launch can be
// measured without a GPU. The device reports the properties of an H100.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kMultiprocessors = 132;
constexpr int kSharedMemory = 227 * 1024;
std::atomic<int64_t> launches{0};

// The cases are values of CUdevice_attribute in cuda.h.
int attribute(int number) {
  switch (number) {
    case 10:  // WARP_SIZE
      return 32;
    case 12:  // MAX_REGISTERS_PER_BLOCK
      return 65536;
    case 16:  // MULTIPROCESSOR_COUNT
      return kMultiprocessors;
    case 75:  // COMPUTE_CAPABILITY_MAJOR
      return 9;
    case 76:  // COMPUTE_CAPABILITY_MINOR
      return 0;
    case 81:  // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
    case 97:  // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
      return kSharedMemory;
    default:
      return 1;
  }
}

int launch(const void*, void*, void**, void**) {
  ++launches;
  return 0;
}

}  // namespace

extern "C" {

int64_t mocked_launches() { return launches; }

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuGetErrorString(int, const char** text) { return *text = "an error of the mocked driver", 0; }
int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGet(int* device, int) { return *device = 0, 0; }
int cuDeviceGetAttribute(int* value, int number, int) { return *value = attribute(number), 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &launches, 0; }
int cuCtxGetCurrent(void** context) { return *context = &launches, 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxGetDevice(int* device) { return *device = 0, 0; }
int cuCtxGetLimit(size_t* value, int) { return *value = 0, 0; }
int cuCtxSetLimit(int, size_t) { return 0; }
int cuModuleLoadData(void** module, const void*) { return *module = &launches, 0; }
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** function, void*, const char*) { return *function = &launches, 0; }
int cuFuncGetAttribute(int* value, int number, void*) {
  // Attribute 0 is the largest number of threads per block; all others are 0.
  return *value = number == 0 ? 1024 : 0, 0;
}
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuFuncSetCacheConfig(void*, int) { return 0; }
int cuStreamIsCapturing(void*, int* status) { return *status = 0, 0; }
int cuPointerGetAttribute(void* value, int, uint64_t pointer) {
  return std::memcpy(value, &pointer, sizeof pointer), 0;
}
int cuPointerGetAttributes(unsigned count, int*, void** values, uint64_t pointer) {
  for (unsigned i = 0; i < count; ++i) std::memcpy(values[i], &pointer, sizeof pointer);
  return 0;
}
int cuLaunchKernelEx(const void* configuration, void* function, void** parameters, void** extra) {
  return launch(configuration, function, parameters, extra);
}
int cuOccupancyMaxActiveClusters(int* clusters, void*, const void*) { return *clusters = 1, 0; }
int cuTensorMapEncodeTiled(void*, ...) { return 0; }
int cuTensorMapEncodeIm2col(void*, ...) { return 0; }

}  // extern "C"
