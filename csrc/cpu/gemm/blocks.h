// A product whose blocks of sums are processed while they are in the cache, and never stored
// together.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace fastbert::cpu {

// The largest number of rows of x and of rows of the weight in a block of sums.
constexpr int64_t kBlockOfRows = 128, kBlockOfColumns = 256;

// The sums x Wᵀ of the rows [row, row + rows) of x and of the rows [column, column + columns) of W,
// in fp32. Rows of sums are kBlockOfColumns elements apart. `own` is memory that belongs to the
// columns: it is the same for all blocks with the same `column`.
struct BlockOfSums {
  int64_t row, rows, column, columns;
  const float* sums;
  void* own;
};

// Calls body(block) for every block of x Wᵀ. The blocks with the same columns are processed by one
// thread, in ascending order of their rows. x is (M, K) and the weight is (N, K), in the dtype of x
// or fp32. A sum has the same bits for every M and every number of threads. `own_bytes` is the size
// of the memory that belongs to the columns of a block.
void for_each_block_of_sums(const at::Tensor& x, const at::Tensor& weight, int64_t own_bytes,
                            const std::function<void(const BlockOfSums& block)>& body);

}  // namespace fastbert::cpu
