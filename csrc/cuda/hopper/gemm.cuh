// The launchers of matrix products with an activation on Hopper GPUs (sm_90a). linear_gelu and
// linear_gelu_gradient call these launchers on such GPUs.

#pragma once

#include "../gemm.cuh"

namespace fastbert::cuda {

cudaError_t hopper_linear_gelu(const LinearGelu& params, cudaStream_t stream);
cudaError_t hopper_linear_gelu_gradient(const LinearGeluGradient& params, cudaStream_t stream);

}  // namespace fastbert::cuda
