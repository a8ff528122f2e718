// The element-wise half of the feed-forward block, gelu(h + bias) and its gradients: what the
// launchers take. Free of torch; cuda_ops.cpp fills these in.

#pragma once

#include <cuda_runtime.h>

#include "launch.cuh"
#include "operands.cuh"

namespace fastbert::cuda {

enum class Gelu : int32_t { erf, tanh };

// y (rows, columns) is contiguous.
struct BiasGeluForward {
  Format format;
  Gelu gelu;
  int64_t rows, columns;
  ConstMatrix h;
  Parameter bias;
  void* y;
};

// dh is contiguous; with a bias, dbias in its format and partial (bias_gelu_partials(rows),
// columns) floats.
struct BiasGeluBackward {
  Format format;
  Gelu gelu;
  int64_t rows, columns;
  ConstMatrix dy, h;
  Parameter bias;
  void* dh;
  float* partial;
  void* dbias;
};

// Rows are taken in chunks, a constant number of them so that the result does not depend on the
// GPU's size.
inline int64_t bias_gelu_partials(int64_t rows) { return rows < 256 ? rows : 256; }

cudaError_t bias_gelu_forward(const BiasGeluForward& params, cudaStream_t stream);
cudaError_t bias_gelu_backward(const BiasGeluBackward& params, cudaStream_t stream);

}  // namespace fastbert::cuda
