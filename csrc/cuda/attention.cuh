// The params of attention, out = dropout(softmax(scale q k^T)) v, dense and packed. This header is
// free of torch; cuda_ops.cpp fills the structs.

#pragma once

#include <cuda_runtime.h>

#include "operands.cuh"
#include "philox.cuh"

namespace fastbert::cuda {

// The rows of all heads of q, k, v or out: head_dim neighbouring 16-bit elements each. Address and
// strides, which count elements, are multiples of kRowAlignment bytes. In packed tensors
// stride_batch is 0.
constexpr int kRowAlignment = 16;
struct HeadRows {
  void* data;
  int64_t stride_batch, stride_head, stride_row;
};

// The mask is true (not 0) where a query attends a key; data is null if there is no mask.
// stride_row is 0 for a mask of keys, which is the same for every query.
struct AttentionMask {
  const uint8_t* data;
  int64_t stride_batch, stride_head, stride_row, stride_key;
};

// The sequences: of max_q queries and max_k keys each, or packed, with their first rows in
// cu_seqlens, int32 (batches + 1,). Packed tensors have rows_q and rows_k rows, of which those from
// cu_seqlens[batches] on belong to no sequence: out is set to 0 there, and lse to -inf.
struct Sequences {
  int32_t batches, heads, max_q, max_k;
  const int32_t *cu_seqlens_q, *cu_seqlens_k;
  int64_t rows_q, rows_k;
};

// lse holds the natural logarithm of the sum of the exponentials of each query; fp32. pair_bits is
// memory of attention_pair_words words at a multiple of 16 bytes, null for none.
struct AttentionForward {
  Format format;     // bf16 or f16
  int32_t head_dim;  // 32, 64 or 128
  Sequences sequences;
  HeadRows q, k, v, out;
  float* lse;
  int64_t lse_stride_batch, lse_stride_head;
  AttentionMask mask;
  Dropout dropout;
  float scale;  // above 0
  uint32_t* pair_bits;
};

// delta (sum of dout * out of each query) and dq_sums (head_dim floats for each query) are memory
// for the kernel, laid out as lse; the kernel needs them for sequences of more than
// kAttentionBlockKeys keys. pair_bits is as in the forward. out and lse come from the forward. dq,
// dk and dv are 0 beyond the last sequence.
struct AttentionBackward {
  Format format;
  int32_t head_dim;
  Sequences sequences;
  HeadRows q, k, v, out, dout;
  const float* lse;
  int64_t lse_stride_batch, lse_stride_head;
  AttentionMask mask;
  Dropout dropout;
  float scale;
  float *delta, *dq_sums;
  HeadRows dq, dk, dv;
  uint32_t* pair_bits;
};

// Shared memory that a block may have on sm_86, sm_89 and sm_120, without what the declarations of
// a kernel and CUDA itself take. Other GPUs allow more.
constexpr int kSharedLimit = 96 * 1024;

// The number of keys up to which the backward needs no further memory.
constexpr int32_t kAttentionBlockKeys = 64;

// Return how many words of 4 bytes a call needs at its pair_bits, for a mask that differs between
// queries. The value of pair_bits does not matter.
int64_t attention_pair_words(const AttentionBackward& params);
int64_t attention_pair_words(const AttentionForward& params);

// Return cudaErrorInvalidValue for a format, head dim or scale without a kernel.
cudaError_t attention_backward(const AttentionBackward& params, cudaStream_t stream);
cudaError_t attention_forward(const AttentionForward& params, cudaStream_t stream);

}  // namespace fastbert::cuda
