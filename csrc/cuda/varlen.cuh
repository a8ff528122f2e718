// Finds the positions of the tokens in a padded batch, so that the padding can be removed on the
// device.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fastbert::cuda {

// `mask` is (batch, length) with any strides, and has elements of 1, 4 or 8 bytes. A token is kept
// if its element is not 0.
struct MaskPlaces {
  const void* mask;
  int32_t element_size;
  int64_t batch, length;
  int64_t stride_row, stride_column;
  // (batch · length,): the position of each kept token in the flattened batch, in order. If `rows`
  // is not null, the positions of the padding follow; otherwise, the remaining elements are not
  // written.
  int64_t* indices;
  // (batch · length,), or null: the inverse permutation of `indices`, which gives the row of each
  // position in the flattened batch.
  int64_t* rows;
  // (batch + 1,): the number of kept tokens before each sequence, and as the last element the
  // number of kept tokens in all sequences.
  int32_t* cu_seqlens;
  // (2,): the number of kept tokens, and the largest number of kept tokens in a sequence.
  int32_t* totals;
};

cudaError_t mask_places(const MaskPlaces& params, cudaStream_t stream);

}  // namespace fastbert::cuda
