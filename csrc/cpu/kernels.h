// What the CPU kernels take, and the table through which one instruction set is reached.
//
// The kernels know nothing of torch: pointers, strides and sizes in, results written to memory that
// the caller owns. Each instruction-set level (level_*.cpp) compiles the same kernels and fills one
// Kernels table; isa.cpp picks a table at run time. This header holds plain data only, no function
// that a level could emit with its own instructions and the linker then share with the others.

#pragma once

#include <cstdint>

namespace fastbert::cpu {

// Storage format of activations; arithmetic and statistics are fp32 in every format.
enum class Format : int32_t { f32, bf16, f16 };

enum class Gelu : int32_t { erf, tanh };

// A row-major matrix whose rows lie `stride` elements apart; data is null where an operand is
// absent.
struct ConstMatrix {
  const void* data;
  int64_t stride;
};

// Element (r, n) is kept iff word n % 4 of Philox(key, counter = (n / 4, r, 0, 0)) >> 8 >=
// threshold.
struct Dropout {
  bool enabled;
  uint32_t key[2];
  uint32_t threshold;
  float scale;
};

// y = LN(residual + dropout(x + x_bias)) over rows of `columns` elements; y is contiguous.
struct LayerNormForward {
  Format format;
  int64_t columns;
  ConstMatrix x, residual;
  const float *weight, *bias, *x_bias;
  Dropout dropout;
  float eps;
  void* y;
  float *mean, *rstd;
};

// Gradients of the sum (dsum) and, under dropout, of x (dx); both contiguous.
// Each chunk of rows adds into its own partial sums: dweight, dbias, dx_bias, `columns` doubles
// each.
struct LayerNormBackward {
  Format format;
  int64_t columns;
  ConstMatrix dy, x, residual;
  const float *weight, *x_bias, *mean, *rstd;
  Dropout dropout;
  void *dsum, *dx;
};

// y = gelu(h + bias); y is contiguous.
struct BiasGeluForward {
  Format format;
  Gelu gelu;
  int64_t columns;
  ConstMatrix h;
  const float* bias;
  void* y;
};

// dh = dy * gelu'(h + bias), contiguous; the partial sum of dh over a chunk's rows is dbias.
struct BiasGeluBackward {
  Format format;
  Gelu gelu;
  int64_t columns;
  ConstMatrix dy, h;
  const float* bias;
  void* dh;
};

// Every function handles the rows [begin, end).
struct Kernels {
  const char* name;
  // Floats of scratch memory that the layer norm kernels need for rows of this length.
  int64_t (*layer_norm_scratch)(int64_t columns);
  void (*layer_norm_forward)(const LayerNormForward&, int64_t begin, int64_t end, float* scratch);
  void (*layer_norm_backward)(const LayerNormBackward&, int64_t begin, int64_t end, float* scratch,
                              double* partial);
  void (*bias_gelu_forward)(const BiasGeluForward&, int64_t begin, int64_t end);
  void (*bias_gelu_backward)(const BiasGeluBackward&, int64_t begin, int64_t end, double* partial);
  // out[n] = sum over the rows of a contiguous (rows, columns) matrix, first row first.
  void (*sum_rows)(const double* matrix, int64_t rows, int64_t columns, float* out);
};

}  // namespace fastbert::cpu
