// The launchers of the element-wise half of the feed-forward, activation(h + bias) and its
// gradients, and their arguments. Free of torch; cuda_ops.cpp fills the structs.

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

// dh is contiguous. dbias (columns) is the sum of dh over the rows, or null; the sum needs
// `partial`, (activation_partials(rows), columns) floats.
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

// The number of chunks of rows does not depend on the GPU, and therefore neither does the sum.
inline int64_t activation_partials(int64_t rows) { return rows < 256 ? rows : 256; }

// Return cudaErrorInvalidValue for an activation or a number of columns without a kernel.
cudaError_t activation_forward(const ActivationForward& params, cudaStream_t stream);
cudaError_t activation_backward(const ActivationBackward& params, cudaStream_t stream);

}  // namespace fastbert::cuda
