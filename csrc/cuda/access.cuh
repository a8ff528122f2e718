// Reads and writes of matrices and parameters by the kernels, up to 16 bytes at a time where
// addresses and lengths allow it.

#pragma once

#include "operands.cuh"

namespace fastbert::cuda {

constexpr int kAccess = 16;  // bytes

inline __host__ __device__ bool aligned(const void* data, int64_t stride, int64_t element) {
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

// Elements that are read or written at once: kCount, but at most 16 bytes.
template <class T, int kCount>
struct alignas(sizeof(T) * (kCount < kWidth<T> ? kCount : kWidth<T>)) Pack {
  static constexpr int kLength = kCount < kWidth<T> ? kCount : kWidth<T>;
  T values[kLength];
};

// 16 bytes as four words. A row that waits for its turn is kept in words, because nvcc takes
// elements of 16 bits apart as soon as they are loaded, and so waits for memory at once.
template <class T>
struct WordPack {
  uint32_t word[4];

  __device__ void operator=(const uint4& bits) {
    word[0] = bits.x, word[1] = bits.y, word[2] = bits.z, word[3] = bits.w;
  }
  __device__ float operator[](int i) const;
};
template <>
inline __device__ float WordPack<float>::operator[](int i) const {
  return __uint_as_float(word[i]);
}
template <>
inline __device__ float WordPack<__half>::operator[](int i) const {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(word[i / 2] >> i % 2 * 16)));
}
template <>
inline __device__ float WordPack<__nv_bfloat16>::operator[](int i) const {
  return __uint_as_float(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16);
}

// Reads kCount elements from column `first` on, a multiple of kCount; elements from `columns` on
// read as 0. `wide` means that the row is aligned and that `columns` is a multiple of kCount.
template <class T, int kCount>
__device__ void load(const T* row, int first, int columns, bool wide, float (&out)[kCount]) {
  using P = Pack<T, kCount>;
  if (wide && first < columns) {
#pragma unroll
    for (int i = 0; i < kCount; i += P::kLength) {
      const P pack = *reinterpret_cast<const P*>(row + first + i);
#pragma unroll
      for (int e = 0; e < P::kLength; ++e) out[i + e] = to_float(pack.values[e]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) out[i] = first + i < columns ? to_float(row[first + i]) : 0.0f;
}

// Writes 16 bytes. nvcc splits some plain stores of a struct into its elements, but not __stcg.
template <class T>
__device__ void write(T* to, const Pack<T, kWidth<T>>& pack) {
  uint4 bits;
  memcpy(&bits, &pack, sizeof(bits));
  __stcg(reinterpret_cast<uint4*>(to), bits);
}

// Writes kCount elements in the same way; none from `columns` on.
template <class T, int kCount>
__device__ void store(T* row, int first, int columns, bool wide, const float (&in)[kCount]) {
  static_assert(kCount % kWidth<T> == 0);
  if (wide && first < columns) {
#pragma unroll
    for (int i = 0; i < kCount; i += kWidth<T>) {
      Pack<T, kWidth<T>> pack;
#pragma unroll
      for (int e = 0; e < kWidth<T>; ++e) pack.values[e] = from_float<T>(in[i + e]);
      write(row + first + i, pack);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (first + i < columns) row[first + i] = from_float<T>(in[i]);
  }
}

template <class T>
__device__ const T* row_of(const ConstMatrix& matrix, int64_t row) {
  return static_cast<const T*>(matrix.data) + row * matrix.stride;
}

// The same for a vector, which allows wide access or does not.
template <class T, int kCount>
__device__ void load(const T* vector, int first, int columns, float (&out)[kCount]) {
  load(vector, first, columns, columns % kCount == 0 && aligned(vector, 0, sizeof(T)), out);
}

template <int kCount>
__device__ void load(const Parameter& parameter, int first, int columns, float (&out)[kCount]) {
  if (parameter.format == Format::f32) {
    load(static_cast<const float*>(parameter.data), first, columns, out);
  } else if (parameter.format == Format::bf16) {
    load(static_cast<const __nv_bfloat16*>(parameter.data), first, columns, out);
  } else {
    load(static_cast<const __half*>(parameter.data), first, columns, out);
  }
}

// The same for a whole warp, each of whose lanes owns 8 columns after those of the lane before. 8
// floats are two accesses; two lanes read those of one and then of the other, and exchange half, so
// that each access covers whole sectors of 32 bytes.
template <int kCount>
__device__ void load_in_pairs(const Parameter& parameter, int first, int columns,
                              float (&out)[kCount]) {
  constexpr int kHalf = kWidth<float>;
  const bool wide = columns % kCount == 0 && aligned(parameter.data, 0, sizeof(float));
  if (kCount != 2 * kHalf || parameter.format != Format::f32 || !wide) {
    load(parameter, first, columns, out);
    return;
  }
  const float* data = static_cast<const float*>(parameter.data);
  const int odd = threadIdx.x % 2;
  const int even_first = first - odd * kCount;
  float of_even[kHalf], of_odd[kHalf];
  load(data, even_first + odd * kHalf, columns, true, of_even);
  load(data, even_first + kCount + odd * kHalf, columns, true, of_odd);
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float other = __shfl_xor_sync(~0u, odd ? of_even[i] : of_odd[i], 1);
    out[i] = odd ? other : of_even[i];
    out[kCount - kHalf + i] = odd ? of_odd[i] : other;
  }
}

}  // namespace fastbert::cuda
