// The operands of the kernels: matrices of activations and vectors of parameters in fp32, fp16 or
// bf16. Both are read and written 16 bytes at a time if addresses and lengths allow it.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace fastbert::cuda {

// The storage format of an operand. Arithmetic and statistics are fp32 in every format.
enum class Format : int32_t { f32, bf16, f16 };

// Returns body(element), where `element` has the storage type that `format` names.
template <class Body>
cudaError_t with_format(Format format, const Body& body) {
  switch (format) {
    case Format::f32:
      return body(float{});
    case Format::bf16:
      return body(__nv_bfloat16{});
    case Format::f16:
      return body(__half{});
  }
  return cudaErrorInvalidValue;
}

// A matrix whose rows are `stride` elements apart. `data` is null if the operand is absent.
struct ConstMatrix {
  const void* data;
  int64_t stride;
};

// A vector with one element for each column of the matrices. Its format may differ from the format
// of the matrices. `data` is null if the parameter is absent.
struct Parameter {
  const void* data;
  Format format;
};

}  // namespace fastbert::cuda
