// Copies of boxes of rows between global and shared memory by the copy engine (TMA).
//
// In attention, a box has up to 128 rows of one head, and 64 neighbouring 16-bit elements of each
// row, or 32 elements at head dim 32. A box in shared memory is aligned to 1024 bytes. A row of 64
// elements takes 128 bytes, and chunk c of 16 bytes in row r is at index c XOR (r % 8) of the row.
// In rows of 64 bytes, chunk c is at index c XOR (r / 2 % 4). wgmma reads both layouts (swizzles of
// 128 and 64 bytes) without conflicts.
//
// In packed tensors, a box neither reads nor writes rows of other sequences, because each sequence
// ends at the bound of a dimension. The tensor map has three dimensions for the rows, whose strides
// are one row, one row, and 2^34 bytes minus one row. Row r of a sequence of `length` rows that
// begins at row `first` has the coordinates (kEnd - length + r, first + length, kEnd) in these
// dimensions. The first of them has kEnd = 2^30 rows, so the first coordinate is beyond the bound
// exactly if r >= length. The address is right because kEnd * 2^34 = 2^64 is 0 in 64-bit address
// arithmetic. Triton's ragged descriptors (triton/tools/ragged_tma.py) use the same wrap-around. A
// load beyond the bound gives 0, so that no NaN of another sequence reaches a product. A store
// beyond the bound writes nothing.

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "../attention.cuh"

namespace fastbert::cuda {

constexpr int kBoxColumns = 64, kBoxRowBytes = 128;
constexpr int kEnd = 1 << 30;

// Returns the number of columns of a box.
inline __host__ __device__ constexpr int box_columns(int head_dim) {
  return head_dim < kBoxColumns ? head_dim : kBoxColumns;
}

// The layout of the rows of a box in shared memory.
template <int kHeadDim>
struct BoxRow {
  static constexpr int kColumns = box_columns(kHeadDim), kBytes = 2 * kColumns;
  static constexpr int kParts = kHeadDim / kColumns, kChunks = kColumns / 8;

  // Returns the byte offset in a box of chunk `chunk`, which has 16 bytes, of row `row`.
  static __device__ int offset(int row, int chunk) {
    return row * kBytes + (chunk ^ (row * kBytes / kBoxRowBytes % kChunks)) * 16;
  }
};

// The coordinates of a row of a head, without the column. `wrap` is kEnd in packed tensors, and 0
// in dense tensors.
struct RowAt {
  int row, head, batch, wrap;

  __device__ RowAt operator+(int rows) const { return {row + rows, head, batch, wrap}; }
};

// Fetches a tensor map in the background, before the first copy needs it.
inline __device__ void prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Starts the load of a box. The load counts its bytes at the mbarrier `barrier`. One thread calls
// this function.
inline __device__ void load_box(uint32_t to, const CUtensorMap& map, int column, const RowAt& at,
                                uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
      "l"(&map), "r"(column), "r"(at.row), "r"(at.head), "r"(at.batch), "r"(at.wrap), "r"(barrier)
      : "memory");
}

// Starts the store of a box. The store belongs to the current group of stores of the calling
// thread.
inline __device__ void store_box(const CUtensorMap& map, int column, const RowAt& at,
                                 uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], "
      "[%6];" ::"l"(&map),
      "r"(column), "r"(at.row), "r"(at.head), "r"(at.batch), "r"(at.wrap), "r"(from)
      : "memory");
}

// Start the load of a box of a matrix without heads, or of the elements of a vector from `column`
// on.
inline __device__ void load_box(uint32_t to, const CUtensorMap& map, int column, int row,
                                uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
inline __device__ void load_vector(uint32_t to, const CUtensorMap& map, int column,
                                   uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2}], [%3];" ::"r"(to),
      "l"(&map), "r"(column), "r"(barrier)
      : "memory");
}

inline __device__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all stores of the calling thread have read shared memory.
inline __device__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements from registers into shared memory. Lane i gives the
// address of row i % 8 of matrix i / 8. With g = lane / 4 and t = lane % 4, a lane holds columns 2t
// and 2t + 1 of row g of each matrix.
inline __device__ void store_matrices(uint32_t address, const uint32_t (&pairs)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

// Returns whether a tensor map can describe the rows of q, k, v, out or dout. The driver takes only
// strides of 16 bytes to 2^40 bytes, so it refuses a dimension that broadcasts, whose stride is 0.
bool has_tensor_map(const HeadRows& x, const Sequences& sequences, int64_t rows);

// Encodes the tensor map for boxes of `box_rows` rows of q, k, v, out or dout.
cudaError_t encode(CUtensorMap& map, const HeadRows& x, Format format, int head_dim,
                   const Sequences& sequences, int64_t rows, int box_rows);

// Encode the tensor map for boxes of `box_rows` rows of a matrix without heads, or for pieces of
// `box` elements of a vector. The row stride of the matrix and both addresses must be multiples of
// 16 bytes.
cudaError_t encode_matrix(CUtensorMap& map, const ConstMatrix& x, Format format, int64_t rows,
                          int64_t columns, int box_rows);
cudaError_t encode_vector(CUtensorMap& map, const void* data, Format format, int64_t size, int box);

}  // namespace fastbert::cuda
