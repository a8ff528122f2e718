// Helpers for a thread block of attention: they find its sequence and head and the keys that its
// queries may attend, and copy or zero rows.

#pragma once

#include "attention.cuh"
#include "copy.cuh"
#include "launch.cuh"

namespace fastbert::cuda {

// The rows of one head of one sequence.
struct Head {
  int batch, head;
  int first_q, first_k;  // first rows in packed tensors; 0 in dense tensors
  int queries, keys;
};

inline __device__ Head head_of(const Sequences& s, int batch, int head) {
  Head h = {batch, head, 0, 0, s.max_q, s.max_k};
  if (s.cu_seqlens_q) {
    h.first_q = s.cu_seqlens_q[batch];
    h.queries = s.cu_seqlens_q[batch + 1] - h.first_q;
    h.first_k = s.cu_seqlens_k[batch];
    h.keys = s.cu_seqlens_k[batch + 1] - h.first_k;
  }
  return h;
}

template <class T>
__device__ T* rows_of(const HeadRows& x, const Head& h, int first) {
  return static_cast<T*>(x.data) + h.batch * x.stride_batch + h.head * x.stride_head +
         first * x.stride_row;
}

// One bit for each key of a tile of 32 keys; bit n is for key n.
using KeyBits = uint32_t;
constexpr int kKeys = 32;
constexpr KeyBits kAllKeys = 0xffffffffu;

// Returns one bit for each key of a tile. The bit is 1 if the key exists and the mask of keys
// allows it, or if the key exists and `mask` is null. All lanes of a warp call this function, and
// each lane reads one byte of the mask.
inline __device__ KeyBits attended_keys(const uint8_t* mask, int64_t stride_key, int first,
                                        int keys) {
  const int left = keys - first;
  if (mask == nullptr) return left >= kKeys ? kAllKeys : left <= 0 ? 0 : (1u << left) - 1;
  const int key = first + static_cast<int>(threadIdx.x) % 32;
  return __ballot_sync(0xffffffffu, key < keys && mask[key * stride_key] != 0);
}

// Starts the copy of kRows rows into a tile. A row for which exists(row) is false is not read and
// becomes 0 in the tile, because its global memory may contain NaN.
template <int kRows, int kColumns, int kThreads, class T, class Exists>
__device__ void copy_rows(uint32_t to, const T* from, int64_t stride_row, const Exists& exists) {
  constexpr int kChunks = kColumns / 8, kStep = kThreads / kChunks;
  static_assert(kRows % kStep == 0 && kStep % 8 == 0);
  // A division of unsigned numbers needs no instructions that correct the sign of the quotient.
  const uint32_t thread = opaque(threadIdx.x);
  const uint32_t first = thread / kChunks, chunk = thread % kChunks;
  to += SharedTile<kColumns>::offset(first, chunk);
  from += first * stride_row + chunk * 8;
#pragma unroll
  for (int row = 0; row < kRows; row += kStep) {
    // The address of a row that does not exist may be invalid, but then copy_chunk reads nothing.
    copy_chunk(to + row * SharedTile<kColumns>::kRowBytes, from + row * stride_row,
               exists(static_cast<int>(first) + row));
  }
}

// Writes 0 to rows `first` to `rows` - 1 of `x`, which belong to no sequence, for the head of the
// thread block. The `blocks` thread blocks of the last sequence share the work.
template <class T, int kHeadDim, int kThreads>
__device__ void zero_slack(const HeadRows& x, const Head& h, int64_t first, int64_t rows, int block,
                           int blocks) {
  constexpr int kChunks = kHeadDim / 8;
  for (int64_t i = block * kThreads + threadIdx.x; i < (rows - first) * kChunks;
       i += blocks * kThreads) {
    T* row =
        static_cast<T*>(x.data) + h.head * x.stride_head + (first + i / kChunks) * x.stride_row;
    *reinterpret_cast<uint4*>(row + i % kChunks * 8) = {0, 0, 0, 0};
  }
}

}  // namespace fastbert::cuda
