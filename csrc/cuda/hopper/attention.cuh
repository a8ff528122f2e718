// Attention on Hopper GPUs (sm_90a). attention_forward and attention_backward call these functions
// if hopper_attention_refuses returns null.

#pragma once

#include "../attention.cuh"

namespace fastbert::cuda {

// Return the reason why the kernels in this folder do not compute a call, or null if they do.
const char* hopper_attention_refuses(const AttentionForward& params);
const char* hopper_attention_refuses(const AttentionBackward& params);

cudaError_t hopper_attention_forward(const AttentionForward& params, cudaStream_t stream);
cudaError_t hopper_attention_backward(const AttentionBackward& params, cudaStream_t stream);

}  // namespace fastbert::cuda
