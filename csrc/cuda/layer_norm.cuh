// The params structs of layer norm of a residual sum, y = LN(residual + dropout(x + x_bias)) (Ba et
// al. 2016). This header does not include torch; cuda_ops.cpp fills the structs.

#pragma once

#include <cuda_runtime.h>

#include "operands.cuh"
#include "philox.cuh"

namespace fastbert::cuda {

// The largest supported number of columns. The limit exists because one block holds a whole row in
// its registers. For longer rows, the launchers return cudaErrorInvalidValue.
constexpr int64_t kMaxColumns = 6144;
// The largest number of blocks of the backward pass, each with its own partial sums: two for each
// multiprocessor of an H100. It is a constant, so the result does not depend on the GPU's size.
constexpr int64_t kMaxPartials = 264;

// y (rows, columns) is contiguous. mean and rstd hold one float per row. bias, x_bias and residual
// may be null.
struct LayerNormForward {
  Format format;
  int64_t rows, columns;
  ConstMatrix x, residual;
  Parameter weight, bias, x_bias;
  Dropout dropout;
  float eps;
  void* y;
  float *mean, *rstd;
};

// dsum and, under dropout, dx are contiguous. partial has (layer_norm_partials(rows), 3, columns)
// floats. dweight and dbias have the format of weight, and dx_bias has the format of x_bias. If
// dbias or x_bias is null, the gradient of that bias is not wanted.
struct LayerNormBackward {
  Format format;
  int64_t rows, columns;
  ConstMatrix dy, x, residual;
  Parameter weight, x_bias;
  const float *mean, *rstd;
  Dropout dropout;
  void *dsum, *dx;
  float* partial;
  void *dweight, *dbias, *dx_bias;
};

inline int64_t layer_norm_partials(int64_t rows) {
  return rows < kMaxPartials ? rows : kMaxPartials;
}

cudaError_t layer_norm_forward(const LayerNormForward& params, cudaStream_t stream);
cudaError_t layer_norm_backward(const LayerNormBackward& params, cudaStream_t stream);

}  // namespace fastbert::cuda
