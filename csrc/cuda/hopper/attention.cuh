// Attention on Hopper GPUs (sm_90a), which attention_forward and attention_backward call where it
// is faster.

#pragma once

#include "../attention.cuh"

namespace fastbert::cuda {

// Returns the reason why the kernels of this folder do not serve a call, or null if they serve it.
const char* hopper_attention_refuses(const AttentionForward& params);
const char* hopper_attention_refuses(const AttentionBackward& params);

cudaError_t hopper_attention_forward(const AttentionForward& params, cudaStream_t stream);
cudaError_t hopper_attention_backward(const AttentionBackward& params, cudaStream_t stream);

}  // namespace fastbert::cuda
