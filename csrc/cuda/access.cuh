// Functions with which the kernels read and write matrices and parameters. They access up to 16
// bytes at a time if addresses and lengths allow it.

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

// The elements that one access reads or writes: kCount elements, but at most 16 bytes.
template <class T, int kCount>
struct alignas(sizeof(T) * (kCount < kWidth<T> ? kCount : kWidth<T>)) Pack {
  static constexpr int kLength = kCount < kWidth<T> ? kCount : kWidth<T>;
  T values[kLength];
};

// 16 bytes of a row as four words of 32 bits. A row that is loaded before it is needed stays in
// words. With elements of 16 bits, nvcc would unpack the elements immediately after the load, and
// the thread would wait for memory there.
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

// Reads the kCount elements of `row` that begin at column `first`, which must be a multiple of
// kCount. `out` is 0 for columns from `columns` on. If `wide` is true, the row must be aligned to
// 16 bytes and `columns` must be a multiple of kCount.
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

// Writes 16 bytes in one access. The function uses __stcg, because nvcc splits some ordinary stores
// of a struct into stores of its elements.
template <class T>
__device__ void write(T* to, const Pack<T, kWidth<T>>& pack) {
  uint4 bits;
  memcpy(&bits, &pack, sizeof(bits));
  __stcg(reinterpret_cast<uint4*>(to), bits);
}

// Writes `in` to the kCount elements of `row` that begin at column `first`, under the same
// conditions as `load`. Elements at column `columns` and later are not written.
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

// Reads kCount elements of a vector, as the first `load` does for a row. This function itself
// checks whether the vector allows 16-byte access.
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

// Reads kCount elements of a parameter into each lane of a warp, where the columns of a lane follow
// the columns of the lane before. 8 floats take two accesses of 16 bytes. Therefore two
// neighbouring lanes together read first the 8 floats of the even lane, 4 per lane, and then the 8
// floats of the odd lane. Each lane then gives the other lane the 4 floats that belong to it. So
// each access of the two lanes covers one whole sector of 32 bytes.
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
