// The params structs of attention, out = dropout(softmax(scale q k^T)) v, for dense and packed
// tensors. This header does not include torch; cuda_ops.cpp fills the structs.

#pragma once

#include <cuda_runtime.h>

#include "operands.cuh"
#include "philox.cuh"

namespace fastbert::cuda {

// The rows of all heads in q, k, v or out. A row has head_dim neighbouring 16-bit elements. The
// strides count elements. The address and the strides must be multiples of kRowAlignment bytes. In
// packed tensors, stride_batch is 0.
constexpr int kRowAlignment = 16;
struct HeadRows {
  void* data;
  int64_t stride_batch, stride_head, stride_row;
};

// An element of the mask is not 0 if the query attends the key; data is null if there is no mask.
// stride_row is 0 for a mask of keys, which is the same for every query.
struct AttentionMask {
  const uint8_t* data;
  int64_t stride_batch, stride_head, stride_row, stride_key;
};

// The sequences of a batch. In dense tensors, each sequence has max_q queries and max_k keys. In
// packed tensors, cu_seqlens_q and cu_seqlens_k, int32 (batches + 1,), contain the first row of
// each sequence, and the tensors have rows_q and rows_k rows. Rows from cu_seqlens[batches] on
// belong to no sequence; the kernels set out to 0 and lse to -inf in these rows.
struct Sequences {
  int32_t batches, heads, max_q, max_k;
  const int32_t *cu_seqlens_q, *cu_seqlens_k;
  int64_t rows_q, rows_k;
};

// lse receives the log-sum-exp of the scores of each query, as a natural logarithm in fp32.
// pair_bits points to attention_pair_words(params) words at an address that is a multiple of 16
// bytes, or is null if no words are needed.
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

// delta has the sum of dout * out for each query, and dq_sums has head_dim floats for each query.
// Both are temporary memory of the kernel in the layout of lse, and are needed only for sequences
// of more than kAttentionBlockKeys keys. pair_bits is the same as in AttentionForward. out and lse
// are results of the forward. The kernels set dq, dk and dv to 0 in the rows after the last
// sequence.
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

// The dynamic shared memory, in bytes, that a block may request on sm_86, sm_89 and sm_120. A
// multiprocessor of these GPUs has 100 KiB; the remaining 4 KiB are for the static shared memory of
// a kernel and for CUDA itself. Other GPUs allow more.
constexpr int kSharedLimit = 96 * 1024;

// The largest number of keys of a sequence for which the backward needs neither delta nor dq_sums.
constexpr int32_t kAttentionBlockKeys = 64;

// Return how many words of 4 bytes a call needs in pair_bits. Only the kernels for Hopper need such
// words, and only for a mask that differs between queries. The functions do not read
// params.pair_bits itself.
int64_t attention_pair_words(const AttentionBackward& params);
int64_t attention_pair_words(const AttentionForward& params);

// Return cudaErrorInvalidValue if no kernel supports the format, head dim or scale.
cudaError_t attention_backward(const AttentionBackward& params, cudaStream_t stream);
cudaError_t attention_forward(const AttentionForward& params, cudaStream_t stream);

}  // namespace fastbert::cuda
