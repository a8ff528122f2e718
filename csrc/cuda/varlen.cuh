// The places of the tokens of a padded batch, for the removal of the padding on the device.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fastbert::cuda {

// A mask (batch, length) at any strides, in elements of 1, 4 or 8 bytes; nonzero bits keep a token.
struct MaskPlaces {
  const void* mask;
  int32_t element_size;
  int64_t batch, length;
  int64_t stride_row, stride_column;
  // (batch · length,): the place in the flat batch of each kept token, in order. With `rows`, the
  // places of the padding follow; otherwise the rest is not written.
  int64_t* indices;
  // (batch · length,), or null: the inverse permutation, the row of each place.
  int64_t* rows;
  // (batch + 1,)
  int32_t* cu_seqlens;
  // (2,): the number of tokens, and the length of the longest sequence.
  int32_t* totals;
};

cudaError_t mask_places(const MaskPlaces& params, cudaStream_t stream);

}  // namespace fastbert::cuda
