// The launchers and params structs for the element-wise part of the feed-forward: activation(h +
// bias) and its gradients. This header does not include torch; cuda_ops.cpp fills the structs.

#pragma once

#include <cuda_runtime.h>

#include "../activations.h"
#include "launch.cuh"
#include "operands.cuh"

namespace fastbert::cuda {

// The activation is gelu or gelu_tanh; y (rows, columns) is contiguous.
struct ActivationForward {
  Format format;
  Activation activation;
  int64_t rows, columns;
  ConstMatrix h;
  Parameter bias;
  void* y;
};

// dh is contiguous. dbias (columns) receives the sum of dh over the rows, or is null if this sum is
// not wanted. For the sum, `partial` must have (activation_partials(rows), columns) floats.
struct ActivationBackward {
  Format format;
  Activation activation;
  int64_t rows, columns;
  ConstMatrix dy, h;
  Parameter bias;
  void* dh;
  float* partial;
  void* dbias;
  Format dbias_format;
};

// Returns the number of chunks into which the backward divides `rows` rows for the sums of dh. This
// number does not depend on the GPU, so dbias has the same bits on every GPU.
inline int64_t activation_partials(int64_t rows) { return rows < 256 ? rows : 256; }

// Return cudaErrorInvalidValue if no kernel supports the activation or the number of columns.
cudaError_t activation_forward(const ActivationForward& params, cudaStream_t stream);
cudaError_t activation_backward(const ActivationBackward& params, cudaStream_t stream);

}  // namespace fastbert::cuda
