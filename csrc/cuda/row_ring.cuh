// Asynchronous copies of rows from global memory to the registers of a block's threads.
//
// A thread uses cp.async to copy its part of each row to shared memory, one or two rows ahead. When
// it loads its part of a row into registers, it starts the copy of a later row to the same shared
// memory. A thread copies only its own part, so it waits only for its own copies, and no thread
// waits for another thread.

#pragma once

#include "access.cuh"
#include "copy.cuh"

namespace fastbert::cuda {

// The layout of rows over a block: kThreads threads share a row, and each holds kElements elements
// in vectors of kWidth<T>. If kExact is true, rows have exactly kThreads * kElements columns and
// allow 16-byte access.
template <class T, int kBlockThreads, int kRowThreads, int kRowElements, bool kIsExact>
struct Layout {
  using Element = T;
  static constexpr int kThreads = kRowThreads, kElements = kRowElements;
  static constexpr bool kExact = kIsExact;
  static constexpr int kBlock = kBlockThreads;
  static constexpr int kRows = kBlock / kThreads;  // rows of a block at a time
  static constexpr int kVectors = kElements / kWidth<T>;
  static_assert(kElements % kWidth<T> == 0);
  using Vectors = float[kVectors][kWidth<T>];

  static __device__ int column(int vector) {
    return (vector * kThreads + static_cast<int>(threadIdx.x) % kThreads) * kWidth<T>;
  }
  // first_row returns the first row of the block, and row_step the distance from a row to the next
  // row that the same threads take.
  static __device__ int64_t first_row() { return static_cast<int64_t>(blockIdx.x) * kRows; }
  static __device__ int64_t row_step() { return static_cast<int64_t>(gridDim.x) * kRows; }
  // Returns whether `row` exists. The first row of the block in the same iteration must exist.
  static __device__ bool exists(int64_t row, int64_t rows) { return kRows == 1 || row < rows; }
  static __device__ int group() { return static_cast<int>(threadIdx.x) / kThreads; }
  static __device__ bool inside(int column, int columns) { return kExact || column < columns; }
};

// The part of a row that a thread holds, in the storage format of the matrix.
template <class L>
using RowPart = WordPack<typename L::Element>[L::kVectors];

// A ring in shared memory of the rows of kMatrices matrices. `take` loads the next row of each
// matrix, in order.
template <class L, int kMatrices>
class RowRing {
  using T = typename L::Element;
  static constexpr int kVectorBytes = L::kBlock * kAccess;
  static constexpr int kStageBytes = kMatrices * L::kVectors * kVectorBytes;
  static constexpr int kMostBytes = 80 * 1024;  // so that a block fits GPUs with 100 KB

 public:
  static constexpr int kStages = 2 * kStageBytes <= kMostBytes ? 2 : 1;
  static constexpr int kBytes = kStages * kStageBytes;

  // Begins to copy the first rows. The last matrix may be absent, and is then not copied. `wide`
  // means that all matrices allow 16-byte access.
  __device__ RowRing(unsigned char* memory, const ConstMatrix (&matrices)[kMatrices], int64_t rows,
                     int columns, bool wide)
      : memory_(memory + threadIdx.x * kAccess),
        row_(L::first_row() + L::group()),
        rows_(rows),
        columns_(columns),
        wide_(wide),
        last_(matrices[kMatrices - 1].data != nullptr) {
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
      from_[m] = row_of<T>(matrices[m], row_) + L::column(0);
      step_[m] = matrices[m].stride * L::row_step();
    }
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) copy(memory_ + stage * kStageBytes);
  }

  // Loads the next row of each matrix from shared memory into registers, and starts the copies of
  // the later rows that take their places in shared memory. After the last row, and for an absent
  // matrix, the function loads zeros.
  __device__ void take(RowPart<L> (&parts)[kMatrices]) {
    wait_for_copies<kStages - 1>();
    unsigned char* const stage = memory_ + stage_;
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
      if (!present(m)) {
#pragma unroll
        for (int v = 0; v < L::kVectors; ++v) parts[m][v] = uint4{};
        continue;
      }
#pragma unroll
      for (int v = 0; v < L::kVectors; ++v)
        parts[m][v] = *reinterpret_cast<const uint4*>(stage + (m * L::kVectors + v) * kVectorBytes);
    }
    copy(stage);
    if (kStages > 1) stage_ = kStageBytes - stage_;
  }

 private:
  __device__ bool present(int m) const { return m < kMatrices - 1 || last_; }
  __device__ void copy(unsigned char* to) {
    const bool exists = row_ < rows_;
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
      if (!present(m)) continue;
#pragma unroll
      for (int v = 0; v < L::kVectors; ++v)
        copy_vector(to + (m * L::kVectors + v) * kVectorBytes, from_[m], v, exists);
      from_[m] += step_[m];
    }
    commit_copies();
    row_ += L::row_step();
  }
  __device__ void copy_vector(unsigned char* to, const T* from, int v, bool exists) {
    const int offset = v * L::kThreads * kWidth<T>, first = L::column(v);
    if (L::kExact || wide_) {
      copy_chunk(shared_address(to), from + offset, exists && L::inside(first, columns_));
    } else {
      Pack<T, kWidth<T>> pack;
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i)
        pack.values[i] = exists && first + i < columns_ ? from[offset + i] : from_float<T>(0.0f);
      memcpy(to, &pack, kAccess);
    }
  }

  unsigned char* memory_;  // the shared memory of this thread
  const T* from_[kMatrices];
  int64_t step_[kMatrices];
  int64_t row_, rows_;       // the row to copy next, and the number of rows
  int columns_, stage_ = 0;  // stage_ is the offset of the next row to take
  bool wide_, last_;
};

}  // namespace fastbert::cuda
