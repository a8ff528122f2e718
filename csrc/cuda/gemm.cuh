// The launchers and params structs of matrix products with an activation in the epilogue. This
// header does not include torch; cuda_ops.cpp fills the structs. All matrices of a call have the
// same 16-bit format.

#pragma once

#include <cuda_runtime.h>

#include "../activations.h"
#include "launch.cuh"
#include "operands.cuh"

namespace fastbert::cuda {

// y = activation(x weight^T + bias), with gelu or gelu_tanh. x is (rows, depth) and weight is
// (columns, depth). y and h are contiguous (rows, columns). h is the pre-activation with the bias,
// rounded to the format, and y is the activation of this h. bias (columns) and h may be null.
struct LinearGelu {
  Format format;
  Activation activation;
  int64_t rows, columns, depth;
  ConstMatrix x, weight;
  const void* bias;
  void *y, *h;
};

// da = dy weight, dh = da * activation'(h) and a = activation(h). dy is (rows, depth) and weight is
// (depth, columns). h, dh and a are contiguous (rows, columns). dbias (columns) receives the sum of
// dh over the rows, or is null if this sum is not wanted. For the sum, `partial` must have
// (gemm_partials(rows), columns) floats.
struct LinearGeluGradient {
  Format format;
  Activation activation;
  int64_t rows, columns, depth;
  ConstMatrix dy, weight;
  const void* h;
  void *dh, *a;
  float* partial;
  void* dbias;
};

constexpr int kGemmRows = 128;  // rows of a tile, on every architecture

inline int64_t gemm_partials(int64_t rows) { return ceil_div(rows, kGemmRows); }

// Return cudaErrorInvalidValue if no kernel supports the format or the activation. They also return
// it if `columns` or `depth` is 0, if a size is 2^30 or more, or if the address or the rows of an
// operand are not multiples of 16 bytes.
cudaError_t linear_gelu(const LinearGelu& params, cudaStream_t stream);
cudaError_t linear_gelu_gradient(const LinearGeluGradient& params, cudaStream_t stream);

}  // namespace fastbert::cuda
