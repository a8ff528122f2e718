// RMS norm of a residual sum, y = weight s / sqrt(mean(s^2) + eps) with s = x + residual, in fp32
// (Zhang and Sennrich 2019). The backward computes the sum s again instead of reading it from
// memory.

#pragma once

#include "layer_norm_kernel.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// Computes 1 / sqrt(mean(s^2) + eps) in double precision. This is necessary for rows with elements
// near 1e30, whose squares overflow in fp32.
inline __attribute__((noinline)) float wide_reciprocal_rms(const float* sum, int64_t columns,
                                                           float eps) {
  double squares = 0.0;
  for (int64_t n = 0; n < columns; ++n) squares += (double)sum[n] * sum[n];
  return (float)(1.0 / __builtin_sqrt(squares / (double)columns + eps));
}

template <class Format, Summands kSummands>
void rms_norm_forward_rows(const RmsNormForward& params, int64_t begin, int64_t end,
                           float* scratch) {
  const RmsNormForward p = params;  // RowSum (layer_norm_kernel.h) explains this copy.
  using Storage = typename Format::Storage;
  for (int64_t row = begin; row < end; ++row) {
    const RowSum<Format, Format, kSummands, RmsNormForward> row_sum(p, row, nullptr);
    Vec squares[kSums] = {};
    const float* sum = fp32_row(row_sum, p.columns, scratch,
                                [&](int64_t, int u, int, Vec v) __attribute__((always_inline)) {
                                  squares[u] = fma(v, v, squares[u]);
                                });
    const double mean = mean_of(squares, p.columns);
    const float rstd = mean < __builtin_inf() ? (float)(1.0 / __builtin_sqrt(mean + p.eps))
                                              : wide_reciprocal_rms(sum, p.columns, p.eps);
    Storage* y = (Storage*)p.y + row * p.columns;
    for_each_vector(p.columns, [&](int64_t n, int count) __attribute__((always_inline)) {
      Format::store(y + n, load(sum + n, count) * rstd * load(p.weight + n, count), count);
    });
    p.rstd[row] = rstd;
  }
}

// Computes dsum = rstd (g - h mean(g h)) of kRows rows, with h = s rstd and g = dy weight. Adds dy
// h to dweight.
template <class Format, Summands kSummands, int kRows>
FASTBERT_INLINE void rms_norm_backward_block(const RmsNormBackward& p, int64_t first,
                                             float* scratch, float* dweight) {
  using Storage = typename Format::Storage;
  float* h[kRows];
  const Storage* dy[kRows];
  float gh_mean[kRows];
  for (int i = 0; i < kRows; ++i) {
    const RowSum<Format, Format, kSummands, RmsNormBackward> row_sum(p, first + i, nullptr);
    const float rstd = p.rstd[first + i];
    dy[i] = row_of<Storage>(p.dy, first + i);
    h[i] = scratch + i * scratch_stride(p.columns);
    Vec gh_sum[kSums] = {};
    for_each_summand(p.columns, [&](int64_t n, int u, int count) __attribute__((always_inline)) {
      const Vec v = row_sum(n, count) * rstd;
      store(h[i] + n, v, count);
      gh_sum[u] = fma(Format::load(dy[i] + n, count) * load(p.weight + n, count), v, gh_sum[u]);
    });
    gh_mean[i] = (float)mean_of(gh_sum, p.columns);
  }
  for_each_vector(p.columns, [&](int64_t n, int count) __attribute__((always_inline)) {
    const Vec weight = load(p.weight + n, count);
    Vec total = {};
    for (int i = 0; i < kRows; ++i) {
      const Vec gradient = Format::load(dy[i] + n, count), normal = load(h[i] + n, count);
      const Vec d = fma(normal, splat(-gh_mean[i]), gradient * weight) * p.rstd[first + i];
      Format::store((Storage*)p.dsum + (first + i) * p.columns + n, d, count);
      total = fma(gradient, normal, total);
    }
    add_to(dweight + n, total, count);
  });
}

template <class Format, Summands kSummands>
void rms_norm_backward_rows(const RmsNormBackward& params, int64_t begin, int64_t end,
                            float* scratch, double* partial) {
  const RmsNormBackward p = params;
  float* sums = scratch_sums(scratch, p.columns);
  for_each_group(
      begin, end, p.columns, sums, partial,
      [&](int64_t row) __attribute__((always_inline)) {
        rms_norm_backward_block<Format, kSummands, kBlockRows>(p, row, scratch, sums);
      },
      [&](int64_t row) __attribute__((always_inline)) {
        rms_norm_backward_block<Format, kSummands, 1>(p, row, scratch, sums);
      });
}

void rms_norm_forward(const RmsNormForward& p, int64_t begin, int64_t end, float* scratch) {
  with_format(p.format, [&](auto format) {
    using Rows = decltype(format);
    return p.residual.data
               ? rms_norm_forward_rows<Rows, Summands::x_and_residual>(p, begin, end, scratch)
               : rms_norm_forward_rows<Rows, Summands::x>(p, begin, end, scratch);
  });
}

void rms_norm_backward(const RmsNormBackward& p, int64_t begin, int64_t end, float* scratch,
                       double* partial) {
  with_format(p.format, [&](auto format) {
    using Rows = decltype(format);
    return p.residual.data
               ? rms_norm_backward_rows<Rows, Summands::x_and_residual>(p, begin, end, scratch,
                                                                        partial)
               : rms_norm_backward_rows<Rows, Summands::x>(p, begin, end, scratch, partial);
  });
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
