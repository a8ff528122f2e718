"""The PTX machine's CUDA runtime refuses the launches and calls that a GPU's runtime refuses."""

from __future__ import annotations

import itertools
import threading
from ctypes import (
    Structure,
    addressof,
    byref,
    c_char_p,
    c_uint32,
    c_uint64,
    c_void_p,
    create_string_buffer,
    string_at,
)

import pytest
import torch
from _nvcc import require_nvcc

from fastbert.testing.ptx import nvcc
from fastbert.testing.ptx.cuda_library import CudaLibrary
from fastbert.testing.ptx.cuda_operators import CUDA
from ptxmachine import tensor_map

KIB = 1024
SUCCESS, INVALID_VALUE, INVALID_CONFIGURATION, INVALID_CONTEXT, OUT_OF_RESOURCES = 0, 1, 9, 201, 701
INVALID_CLUSTER_SIZE = 912
# The kernels have 32 KiB of static shared memory and at most 256 threads. Each test uses new
# kernels, because an attribute that a test sets for a kernel lasts until the process ends.
SOURCE = """
#include "driver.cuh"
#include "hopper/tma.cuh"
#include "launch.cuh"

using namespace fastbert::cuda;

struct Params {
  int* out;
};

template <int>
__global__ void __launch_bounds__(256) fill_kernel(Params p) {
  extern __shared__ int dynamic[];
  __shared__ int memory[8192];
  memory[threadIdx.x] = threadIdx.x;
  dynamic[threadIdx.x] = 1;
  __syncthreads();
  p.out[threadIdx.x] = memory[threadIdx.x] + dynamic[threadIdx.x];
}

using Kernel = void (*)(Params);
const Kernel kernels[] = {
    fill_kernel<0>, fill_kernel<1>, fill_kernel<2>,  fill_kernel<3>,  fill_kernel<4>,
    fill_kernel<5>, fill_kernel<6>, fill_kernel<7>,  fill_kernel<8>,  fill_kernel<9>,
    fill_kernel<10>, fill_kernel<11>, fill_kernel<12>, fill_kernel<13>, fill_kernel<14>,
};

extern "C" {
int set_shared(int kernel, int bytes) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernels[kernel]),
                              cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
int run_kernel(Params* p, int kernel, unsigned x, unsigned y, unsigned z, unsigned threads,
               int shared) {
  void* arguments[] = {p};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernels[kernel]), dim3(x, y, z),
                          dim3(threads), arguments, shared, nullptr);
}
__global__ void __cluster_dims__(2, 1, 1) rank_kernel(Params p) {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) p.out[blockIdx.x] = 10 + rank;
}
int launch_clusters(Kernel kernel, Params* p, unsigned blocks, unsigned threads, size_t shared,
                    unsigned cluster, unsigned attributes) {
  void* arguments[] = {p};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared;
  config.attrs = &attribute, config.numAttrs = attributes;
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}
// Without an attribute if cluster is 0.
int run_ranks(Params* p, unsigned blocks, unsigned cluster) {
  return launch_clusters(rank_kernel, p, blocks, 32, 0, cluster, cluster > 0);
}
int run_cluster(Params* p, int kernel, unsigned blocks, unsigned cluster) {
  return launch_clusters(kernels[kernel], p, blocks, 256, 1024, cluster, 1);
}
int run_launch(Params* p, int kernel, int shared) {
  return launch(kernels[kernel], dim3(1), 256, *p, nullptr, shared);
}
int set_device(int number) { return cudaSetDevice(number); }
// A map of 64 x 64 elements and a box of 32 x 64 in a swizzle of 128 bytes, but for one change.
int encode_matrix(CUtensorMap* map, void* data, const uint64_t* sizes, uint64_t stride,
                  const unsigned* box, int type, int interleave, int fill) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                              const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                              const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static_assert(sizeof(cuuint64_t) == sizeof(uint64_t));
  const cuuint64_t strides[] = {stride};
  const cuuint32_t steps[] = {1, 1};
  const auto function = reinterpret_cast<Encode>(driver_function("cuTensorMapEncodeTiled"));
  return error_of(function(
      map, static_cast<CUtensorMapDataType>(type), 2, data,
      reinterpret_cast<const cuuint64_t*>(sizes), strides, box, steps,
      static_cast<CUtensorMapInterleave>(interleave), CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_NONE, static_cast<CUtensorMapFloatOOBfill>(fill)));
}
int encode(void* data) {
  CUtensorMap map;
  return encode_vector(map, data, Format::bf16, 256, 256);
}
int encode_without_context(void* data) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                              const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                              const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  CUtensorMap map;
  const cuuint64_t sizes[] = {256};
  const cuuint32_t box[] = {256}, steps[] = {1};
  const auto function = reinterpret_cast<Encode>(driver_function("cuTensorMapEncodeTiled"));
  return error_of(function(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 1, data, sizes, sizes, box,
                           steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                           CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}
const char* name_of(int error) { return driver_name(static_cast<cudaError_t>(error)); }
}
"""

numbers = itertools.count()


class Params(Structure):
    """The single parameter of the kernels, which is a pointer."""

    _fields_ = [("out", c_void_p)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Return the library of the kernels above and of csrc/cuda's encoder of tensor maps."""
    require_nvcc()
    folder = tmp_path_factory.mktemp("runtime")
    source = folder / "front.cu"
    source.write_text(SOURCE, encoding="utf-8")
    sources = [CUDA / "hopper" / "tensor_map.cu", source]
    return CudaLibrary(sources, folder, "90a", nvcc.flags_of("90a"))


@pytest.fixture
def kernel():
    """Return the number of a kernel that no other test has used."""
    return next(numbers)


def run(library, kernel, grid=(1, 1, 1), threads=256, shared=1 * KIB):
    """Launch a kernel and return the error code of the launch; 0 means success."""
    out = torch.zeros(256, dtype=torch.int32)
    params = Params(out.data_ptr())
    error = library.call("run_kernel", byref(params), kernel, *grid, threads, shared, memory=[out])
    expected = torch.arange(1, 257) if error == SUCCESS else torch.zeros(256)
    assert torch.equal(out, expected.int())
    return error


def in_new_thread(function):
    """Return the result of `function` in a new thread, which has not called the runtime."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def data():
    """Return a 16-byte-aligned address for a tensor map; no test accesses its memory."""
    return c_void_p(1 << 20)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, SUCCESS),
        ({"grid": (0, 1, 1)}, INVALID_CONFIGURATION),
        ({"grid": (1, 0, 1)}, INVALID_CONFIGURATION),
        ({"grid": (1, 65536, 1)}, INVALID_CONFIGURATION),
        ({"grid": (1, 1, 65536)}, INVALID_CONFIGURATION),
        ({"threads": 0}, INVALID_CONFIGURATION),
        ({"threads": 1056}, INVALID_CONFIGURATION),
        ({"threads": 288}, OUT_OF_RESOURCES),
        ({"shared": 16 * KIB}, SUCCESS),
        ({"shared": 16 * KIB + 4}, INVALID_VALUE),
    ],
)
def test_a_launch_within_the_limits_of_a_gpu(library, options, error):
    # These launches change no attribute of the kernel, so all cases use the same kernel.
    assert run(library, 14, **options) == error


@pytest.mark.parametrize(
    ("allowed", "shared", "error"),
    [
        (64 * KIB, 64 * KIB, SUCCESS),
        (64 * KIB, 65 * KIB, INVALID_VALUE),
        # The runtime also enforces a limit below the default of 48 KiB.
        (8 * KIB, 9 * KIB, INVALID_VALUE),
        (195 * KIB, 195 * KIB, SUCCESS),
    ],
)
def test_a_kernel_may_ask_for_more_shared_memory(library, kernel, allowed, shared, error):
    assert library.functions.set_shared(kernel, allowed) == SUCCESS
    assert run(library, kernel, shared=shared) == error


def test_no_kernel_has_more_shared_memory_than_a_multiprocessor(library, kernel):
    """A block on a Hopper GPU has at most 227 KiB of static and dynamic shared memory together."""
    assert library.functions.set_shared(kernel, 195 * KIB + 1) == INVALID_VALUE
    assert run(library, kernel, shared=17 * KIB) == INVALID_VALUE


@pytest.mark.parametrize("shared", [1, 16, 32, 48, 195])
def test_launch_asks_for_the_shared_memory_that_a_kernel_needs(library, kernel, shared):
    """`launch` raises the limit if static and dynamic memory together exceed the default 48 KiB."""
    out = torch.zeros(256, dtype=torch.int32)
    params = Params(out.data_ptr())
    assert library.call("run_launch", byref(params), kernel, shared * KIB, memory=[out]) == SUCCESS
    assert torch.equal(out, torch.arange(1, 257).int())


@pytest.mark.parametrize(
    ("blocks", "cluster", "error"),
    [
        (1, 1, SUCCESS),
        (2, 2, SUCCESS),
        (8, 8, SUCCESS),
        (16, 16, INVALID_CLUSTER_SIZE),
        (3, 2, INVALID_CLUSTER_SIZE),
        (2, 0, INVALID_CLUSTER_SIZE),
    ],
)
def test_a_cluster_has_one_to_eight_blocks_of_the_grid(library, blocks, cluster, error):
    out = torch.zeros(256, dtype=torch.int32)
    params = Params(out.data_ptr())
    # All blocks of this kernel store equal values, which the machine would report as a race.
    given = {"memory": [out], "races": False}
    assert library.call("run_cluster", byref(params), 14, blocks, cluster, **given) == error


@pytest.mark.parametrize(
    ("blocks", "cluster", "error"),
    [
        (4, 0, SUCCESS),
        (4, 2, SUCCESS),
        (4, 1, INVALID_CLUSTER_SIZE),
        (4, 4, INVALID_CLUSTER_SIZE),
        (3, 0, INVALID_CLUSTER_SIZE),
    ],
)
def test_a_kernel_may_require_its_cluster(library, blocks, cluster, error):
    out = torch.zeros(4, dtype=torch.int32)
    params = Params(out.data_ptr())
    assert library.call("run_ranks", byref(params), blocks, cluster, memory=[out]) == error
    assert out.tolist() == ([10, 11, 10, 11] if error == SUCCESS else [0] * 4)


def test_the_driver_needs_a_context_in_the_calling_thread(library, kernel):
    encode, name_of = library.functions.encode_without_context, library.functions.name_of
    name_of.restype = c_char_p
    error = in_new_thread(lambda: encode(data()))
    assert (error, name_of(error)) == (INVALID_CONTEXT, b"CUDA_ERROR_INVALID_CONTEXT")
    after_device = in_new_thread(lambda: (library.functions.set_device(0), encode(data())))
    assert after_device == (SUCCESS, SUCCESS)
    assert in_new_thread(lambda: (run(library, kernel), encode(data()))) == (SUCCESS, SUCCESS)


def test_a_tensor_map_is_encoded_in_a_thread_without_a_context(library):
    """Encoding succeeds in a new thread; attention may be the first call of an autograd thread."""
    assert in_new_thread(lambda: library.functions.encode(data())) == SUCCESS


MATRIX = {
    "at": 0, "data": 1 << 20, "sizes": (64, 64), "stride": 128, "box": (64, 32), "type": 9,
    "interleave": 0, "fill": 0,
}  # fmt: skip


def encode_matrix(library, *, at, data, sizes, stride, box, type, interleave, fill):
    """Encode a tensor map at the offset `at`, and return the driver's error code and the map."""
    memory = create_string_buffer(256)
    place = addressof(memory) + -addressof(memory) % 64 + at
    error = library.functions.encode_matrix(
        c_void_p(place), c_void_p(data), (c_uint64 * 2)(*sizes), c_uint64(stride),
        (c_uint32 * 2)(*box), type, interleave, fill,
    )  # fmt: skip
    return error, string_at(place, 128)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({}, SUCCESS),
        ({"at": 8}, INVALID_VALUE),
        ({"data": (1 << 20) + 8}, INVALID_VALUE),
        ({"sizes": (64, 0)}, INVALID_VALUE),
        ({"stride": 136}, INVALID_VALUE),
        ({"stride": (1 << 40) - 16}, SUCCESS),
        ({"stride": 1 << 40}, INVALID_VALUE),
        ({"box": (64, 256)}, SUCCESS),
        ({"box": (64, 257)}, INVALID_VALUE),
        ({"box": (64, 0)}, INVALID_VALUE),
        ({"box": (4, 32)}, INVALID_VALUE),
        ({"box": (72, 32)}, INVALID_VALUE),
        ({"interleave": 1}, INVALID_VALUE),
        # Elements outside the tensor can be NaN only in a floating-point type; type 1 is u16.
        ({"fill": 1}, SUCCESS),
        ({"fill": 1, "type": 1}, INVALID_VALUE),
    ],
)
def test_a_tensor_map_that_the_driver_encodes(library, change, error):
    library.functions.set_device(0)
    assert encode_matrix(library, **{**MATRIX, **change})[0] == error


def test_the_runtime_and_the_machine_encode_one_map(library):
    """The driver and the PTX machine's `tensor_map` encode a matrix with the same bytes."""
    library.functions.set_device(0)
    matrix = torch.zeros(64, 64, dtype=torch.bfloat16)
    _, encoded = encode_matrix(library, **{**MATRIX, "data": matrix.data_ptr()})
    assert encoded == tensor_map(matrix, (32, 64), swizzle=128)


def test_the_error_of_the_driver_is_returned(library):
    name_of = library.functions.name_of
    name_of.restype = c_char_p
    error = in_new_thread(lambda: library.functions.encode(c_void_p(8)))
    assert (error, name_of(error)) == (INVALID_VALUE, b"CUDA_ERROR_INVALID_VALUE")
    assert name_of(INVALID_CONFIGURATION) is None
