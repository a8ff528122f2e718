// Layer norm of a residual sum, y = LN(residual + dropout(x + x_bias)) (Ba et al. 2016), rows in
// fp32.
//
// Forward keeps the sum of one row in scratch memory (L1-sized for BERT) and runs the corrected
// two-pass algorithm over it: the deviations from a first mean also give what rounding left of the
// mean, so that rows around 1e4 and constant rows come out right. Backward forms the sum again
// instead of storing it.

#pragma once

#include "formats.h"
#include "kernels.h"
#include "philox.h"
#include "vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// The backward pass takes rows in blocks, so that a block's share of a parameter's gradient is
// summed in registers and memory is touched once.
constexpr int kBlockRows = 4;

// Scratch of one thread: for each row of a block the row in fp32, then its dropout mask.
FASTBERT_INLINE int64_t scratch_row(int64_t columns) { return (columns + 15) / 16 * 16; }

FASTBERT_INLINE int64_t scratch_stride(int64_t columns) {
  return scratch_row(columns) + mask_length(columns);
}

int64_t layer_norm_scratch(int64_t columns) { return kBlockRows * scratch_stride(columns); }

FASTBERT_INLINE uint32_t* scratch_mask(float* scratch, int64_t columns) {
  return (uint32_t*)(scratch + scratch_row(columns));
}

template <class Storage>
FASTBERT_INLINE const Storage* row_of(const ConstMatrix& matrix, int64_t row) {
  return matrix.data ? (const Storage*)matrix.data + row * matrix.stride : nullptr;
}

// residual + dropout(x + x_bias) of one row, from element n on. P is either params struct. Kernels
// work on local copies of their params: what a store could alias would be read again for every
// register.
template <class Format, class P>
struct RowSum {
  using Storage = typename Format::Storage;

  const P& p;
  const Storage *x, *residual;
  const uint32_t* mask;

  FASTBERT_INLINE RowSum(const P& params, int64_t row, uint32_t* mask_memory)
      : p(params),
        x(row_of<Storage>(params.x, row)),
        residual(row_of<Storage>(params.residual, row)),
        mask(mask_memory) {
    if (p.dropout.enabled) dropout_mask(p.dropout, row, p.columns, mask_memory);
  }

  FASTBERT_INLINE Vec operator()(int64_t n, int count) const {
    Vec v = Format::load(x + n, count);
    if (p.x_bias) v += load(p.x_bias + n, count);
    if (p.dropout.enabled) v = drop(v, mask + n, p.dropout.scale, count);
    if (residual) v += Format::load(residual + n, count);
    return v;
  }
};

struct Moments {
  float mean, correction, rstd;  // mean + correction is the mean to about twice fp32's precision
};

// Squares of the deviations left the floats' range: rows around 1e30. Doubles hold them.
inline __attribute__((noinline)) Moments wide_moments(const float* sum, int64_t columns,
                                                      float eps) {
  double total = 0.0, squares = 0.0;
  for (int64_t n = 0; n < columns; ++n) total += sum[n];
  const double mean = total / (double)columns;
  for (int64_t n = 0; n < columns; ++n) squares += (sum[n] - mean) * (sum[n] - mean);
  const double variance = squares / (double)columns;
  const float rounded = (float)mean;
  return {rounded, (float)(mean - rounded), (float)(1.0 / __builtin_sqrt(variance + eps))};
}

FASTBERT_INLINE Moments moments(const float* sum, Vec (&totals)[kSums], int64_t columns,
                                float eps) {
  const float mean = (float)mean_of(totals, columns);
  Vec deviations[kSums] = {}, squares[kSums] = {};
  for_each_summand(columns, [&](int64_t n, int u, int count) __attribute__((always_inline)) {
    const Vec d = first_lanes(load(sum + n, count) - mean, count);
    deviations[u] += d;
    squares[u] = fma(d, d, squares[u]);
  });
  const double correction = mean_of(deviations, columns);
  const double variance = mean_of(squares, columns) - correction * correction;
  if (!(variance < __builtin_inf())) return wide_moments(sum, columns, eps);
  const double positive = variance > 0.0 ? variance : 0.0;
  return {mean, (float)correction, (float)(1.0 / __builtin_sqrt(positive + eps))};
}

template <class Format>
void layer_norm_forward_rows(const LayerNormForward& params, int64_t begin, int64_t end,
                             float* sum) {
  const LayerNormForward p = params;
  using Storage = typename Format::Storage;
  uint32_t* mask = scratch_mask(sum, p.columns);
  for (int64_t row = begin; row < end; ++row) {
    const RowSum<Format, LayerNormForward> row_sum(p, row, mask);
    Vec totals[kSums] = {};
    for_each_summand(p.columns, [&](int64_t n, int u, int count) __attribute__((always_inline)) {
      const Vec v = row_sum(n, count);
      totals[u] += v;
      store(sum + n, v, count);
    });
    const Moments m = moments(sum, totals, p.columns, p.eps);
    Storage* y = (Storage*)p.y + row * p.columns;
    const Vec shift = splat(-m.correction * m.rstd);
    for_each_vector(p.columns, [&](int64_t n, int count) __attribute__((always_inline)) {
      const Vec normal = fma(load(sum + n, count) - m.mean, splat(m.rstd), shift);
      const Vec v = fma(normal, load(p.weight + n, count), load(p.bias + n, count));
      Format::store(y + n, v, count);
    });
    p.mean[row] = m.mean + m.correction;
    p.rstd[row] = m.rstd;
  }
}

// One row on its way through the backward pass.
template <class Storage>
struct BackwardRow {
  const Storage* dy;
  Storage *dsum, *dx;
  float* normalised;
  const uint32_t* mask;
  float rstd, g_mean, gh_mean;
};

// Writes the normalised row h to scratch and takes the means of g = dy * weight and of g h.
template <class Format>
FASTBERT_INLINE BackwardRow<typename Format::Storage> normalise_row(const LayerNormBackward& p,
                                                                    int64_t row, float* scratch) {
  using Storage = typename Format::Storage;
  uint32_t* mask = scratch_mask(scratch, p.columns);
  const RowSum<Format, LayerNormBackward> row_sum(p, row, mask);
  const Storage* dy = row_of<Storage>(p.dy, row);
  const float mean = p.mean[row], rstd = p.rstd[row];
  Vec g_sum[kSums] = {}, gh_sum[kSums] = {};
  for_each_summand(p.columns, [&](int64_t n, int u, int count) __attribute__((always_inline)) {
    const Vec h = (row_sum(n, count) - mean) * rstd;
    const Vec g = Format::load(dy + n, count) * load(p.weight + n, count);
    store(scratch + n, h, count);
    g_sum[u] += g;
    gh_sum[u] = fma(g, h, gh_sum[u]);
  });
  Storage* dsum = (Storage*)p.dsum + row * p.columns;
  Storage* dx = p.dropout.enabled ? (Storage*)p.dx + row * p.columns : nullptr;
  return {dy,
          dsum,
          dx,
          scratch,
          mask,
          rstd,
          (float)mean_of(g_sum, p.columns),
          (float)mean_of(gh_sum, p.columns)};
}

// dsum = rstd (g - mean(g) - h mean(g h)), dweight += dy h, dbias += dy, dx_bias += dx over kRows
// rows.
template <class Format, int kRows>
FASTBERT_INLINE void layer_norm_backward_block(const LayerNormBackward& p, int64_t first,
                                               float* scratch, double* partial) {
  double *dweight = partial, *dbias = partial + p.columns, *dx_bias = partial + 2 * p.columns;
  BackwardRow<typename Format::Storage> block[kRows];
  for (int i = 0; i < kRows; ++i) {
    block[i] = normalise_row<Format>(p, first + i, scratch + i * scratch_stride(p.columns));
  }
  for_each_vector(p.columns, [&](int64_t n, int count) __attribute__((always_inline)) {
    const Vec weight = load(p.weight + n, count);
    Vec dweight_sum = {}, dbias_sum = {}, dx_bias_sum = {};
    for (int i = 0; i < kRows; ++i) {
      const auto& row = block[i];
      const Vec dy = Format::load(row.dy + n, count), h = load(row.normalised + n, count);
      // g is rounded as in its mean, so that a row of one column cancels exactly.
      const Vec g = dy * weight;
      Vec d = fma(h, splat(-row.gh_mean), g - row.g_mean) * row.rstd;
      Format::store(row.dsum + n, d, count);
      if (p.dropout.enabled) {
        d = drop(d, row.mask + n, p.dropout.scale, count);
        Format::store(row.dx + n, d, count);
      }
      dweight_sum = fma(dy, h, dweight_sum);
      dbias_sum += dy;
      dx_bias_sum += d;
    }
    accumulate(dweight + n, dweight_sum, count);
    accumulate(dbias + n, dbias_sum, count);
    if (p.x_bias) accumulate(dx_bias + n, dx_bias_sum, count);
  });
}

template <class Format>
void layer_norm_backward_rows(const LayerNormBackward& params, int64_t begin, int64_t end,
                              float* scratch, double* partial) {
  const LayerNormBackward p = params;
  int64_t row = begin;
  for (; row + kBlockRows <= end; row += kBlockRows) {
    layer_norm_backward_block<Format, kBlockRows>(p, row, scratch, partial);
  }
  for (; row < end; ++row) layer_norm_backward_block<Format, 1>(p, row, scratch, partial);
}

void layer_norm_forward(const LayerNormForward& p, int64_t begin, int64_t end, float* scratch) {
  switch (p.format) {
    case Format::f32:
      return layer_norm_forward_rows<F32>(p, begin, end, scratch);
    case Format::bf16:
      return layer_norm_forward_rows<BF16>(p, begin, end, scratch);
    case Format::f16:
      return layer_norm_forward_rows<F16>(p, begin, end, scratch);
  }
}

void layer_norm_backward(const LayerNormBackward& p, int64_t begin, int64_t end, float* scratch,
                         double* partial) {
  switch (p.format) {
    case Format::f32:
      return layer_norm_backward_rows<F32>(p, begin, end, scratch, partial);
    case Format::bf16:
      return layer_norm_backward_rows<BF16>(p, begin, end, scratch, partial);
    case Format::f16:
      return layer_norm_backward_rows<F16>(p, begin, end, scratch, partial);
  }
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
