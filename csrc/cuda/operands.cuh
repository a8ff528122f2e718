// The operands of the kernels: matrices of activations and vectors of parameters in fp32, fp16 or
// bf16. Matrices are read and written 16 bytes at a time if addresses and lengths allow it.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace fastbert::cuda {

// The storage format. Arithmetic and statistics are fp32 in every format.
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

// Rows are `stride` elements apart. `data` is null for an absent operand.
struct ConstMatrix {
  const void* data;
  int64_t stride;
};

// A vector as long as a row, in its own format. `data` is null for an absent parameter.
struct Parameter {
  const void* data;
  Format format;
};

constexpr int kAccess = 16;  // bytes

inline bool aligned(const void* data, int64_t stride, int64_t element) {
  return reinterpret_cast<uintptr_t>(data) % kAccess == 0 && stride * element % kAccess == 0;
}

template <class T>
constexpr int kWidth = kAccess / static_cast<int>(sizeof(T));

inline __device__ float to_float(float x) { return x; }
inline __device__ float to_float(__half x) { return __half2float(x); }
inline __device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ T from_float(float x);
template <>
inline __device__ float from_float<float>(float x) {
  return x;
}
template <>
inline __device__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
inline __device__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

template <class T>
struct alignas(kAccess) Pack {
  T values[kWidth<T>];
};

// Reads kWidth<T> elements from column `first` on; elements from `columns` on read as 0. `wide`
// means that the row is aligned and that `columns` is a multiple of the width.
template <class T>
__device__ void load(const T* row, int first, int columns, bool wide, float (&out)[kWidth<T>]) {
  if (wide && first < columns) {
    const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(row + first);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) out[i] = to_float(pack.values[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i)
    out[i] = first + i < columns ? to_float(row[first + i]) : 0.0f;
}

template <class T>
__device__ void store(T* row, int first, int columns, bool wide, const float (&in)[kWidth<T>]) {
  if (wide && first < columns) {
    Pack<T> pack;
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) pack.values[i] = from_float<T>(in[i]);
    *reinterpret_cast<Pack<T>*>(row + first) = pack;
    return;
  }
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) {
    if (first + i < columns) row[first + i] = from_float<T>(in[i]);
  }
}

template <class T>
__device__ const T* row_of(const ConstMatrix& matrix, int64_t row) {
  return static_cast<const T*>(matrix.data) + row * matrix.stride;
}

// Every row reads its parameters from L2, for which reads of one element are wide enough.
template <int kCount>
__device__ void load(const Parameter& parameter, int first, int columns, float (&out)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int n = first + i;
    if (n >= columns) {
      out[i] = 0.0f;
    } else if (parameter.format == Format::f32) {
      out[i] = static_cast<const float*>(parameter.data)[n];
    } else if (parameter.format == Format::bf16) {
      out[i] = to_float(static_cast<const __nv_bfloat16*>(parameter.data)[n]);
    } else {
      out[i] = to_float(static_cast<const __half*>(parameter.data)[n]);
    }
  }
}

}  // namespace fastbert::cuda
