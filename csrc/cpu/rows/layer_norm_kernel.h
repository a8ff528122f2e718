// Layer norm of a residual sum, y = LN(residual + dropout(x + x_bias)) (Ba et al. 2016), in fp32.
//
// The forward stores the sum of one row in scratch memory, which fits in the first-level cache for
// BERT, and makes two passes over this memory. The second pass also computes the rounding error of
// the mean, which matters in rows whose elements are near 1e4 or are all equal. The backward
// computes the sum again instead of storing it.

#pragma once

#include "../isa/formats.h"
#include "../isa/kernels.h"
#include "../isa/vec.h"
#include "moments.h"
#include "philox.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// The backward adds the parameter gradients of the rows of a block in registers, and then adds the
// result to fp32 sums in memory. After a group of rows, these fp32 sums are added to sums in double
// precision.
constexpr int kBlockRows = 4;
constexpr int kGroupRows = 16;

// The largest number of parameters with gradients. The scratch memory of one thread begins with the
// fp32 values and the dropout mask of each row of a block. The fp32 sums of a group of rows follow,
// for each of these parameters.
constexpr int kParameters = 3;

FASTBERT_INLINE int64_t scratch_row(int64_t columns) { return (columns + 15) / 16 * 16; }

FASTBERT_INLINE int64_t scratch_stride(int64_t columns) {
  return scratch_row(columns) + mask_length(columns);
}

int64_t layer_norm_scratch(int64_t columns) {
  return kBlockRows * scratch_stride(columns) + kParameters * scratch_row(columns);
}

FASTBERT_INLINE float* scratch_sums(float* scratch, int64_t columns) {
  return scratch + kBlockRows * scratch_stride(columns);
}

FASTBERT_INLINE uint32_t* scratch_mask(float* scratch, int64_t columns) {
  return (uint32_t*)(scratch + scratch_row(columns));
}

template <class Storage>
FASTBERT_INLINE const Storage* row_of(const ConstMatrix& matrix, int64_t row) {
  return matrix.data ? (const Storage*)matrix.data + row * matrix.stride : nullptr;
}

// The operands of the sum that is normalised: x alone, x and residual, or x with any of residual,
// x_bias and dropout. The kernels are compiled for each value, so that the loops of the first two
// cases have no branch.
enum class Summands { x, x_and_residual, any };

// Computes residual + dropout(x + x_bias) for elements of one row. P is a params struct of
// kernels.h. XFormat is the format of x, which is narrower than the format of the residual under
// autocast. Kernels use local copies of their params. A store could alias the original params, and
// the compiler would then read them again for every register.
template <class Format, class XFormat, Summands kSummands, class P>
struct RowSum {
  using Storage = typename Format::Storage;
  using XStorage = typename XFormat::Storage;

  const P& p;
  const XStorage* x;
  const Storage* residual;
  const uint32_t* mask;

  FASTBERT_INLINE RowSum(const P& params, int64_t row, uint32_t* mask_memory)
      : p(params),
        x(row_of<XStorage>(params.x, row)),
        residual(row_of<Storage>(params.residual, row)),
        mask(mask_memory) {
    if constexpr (kSummands == Summands::any) {
      if (p.dropout.enabled) dropout_mask(p.dropout, row, p.columns, mask_memory);
    }
  }

  FASTBERT_INLINE Vec operator()(int64_t n, int count) const {
    Vec v = XFormat::load(x + n, count);
    if constexpr (kSummands == Summands::any) {
      if (p.x_bias) v += load(p.x_bias + n, count);
      if (p.dropout.enabled) v = drop(v, mask + n, p.dropout.scale, count);
    }
    const bool add =
        kSummands == Summands::x_and_residual || (kSummands == Summands::any && residual);
    return add ? v + Format::load(residual + n, count) : v;
  }
};

// Calls visit(n, u, count, v) for every register v of the sum of one row, with the other arguments
// of for_each_summand. Returns a pointer to the sum in fp32. The pointer is `scratch`, or x itself
// if x is the only operand and is stored in fp32.
template <class Format, class XFormat, Summands kSummands, class P, class Visit>
FASTBERT_INLINE const float* fp32_row(const RowSum<Format, XFormat, kSummands, P>& row_sum,
                                      int64_t columns, float* scratch, Visit visit) {
  constexpr bool kInPlace = kSummands == Summands::x && sizeof(typename XFormat::Storage) == 4;
  for_each_summand(columns, [&](int64_t n, int u, int count) __attribute__((always_inline)) {
    const Vec v = row_sum(n, count);
    if (!kInPlace) store(scratch + n, v, count);
    visit(n, u, count, v);
  });
  return kInPlace ? (const float*)row_sum.x : scratch;
}

// Calls write(n, count, v) for every register v of the normalised row, with the weight and the bias
// of p applied. The bias may be null.
template <class P, class Write>
FASTBERT_INLINE void write_normalised(const P& p, const float* sum, const Moments& m, Write write) {
  const Vec shift = splat(-m.correction * m.rstd), mean = splat(m.mean), rstd = splat(m.rstd);
  const auto normal = [&](int64_t n, int count) __attribute__((always_inline)) {
    return fma(load(sum + n, count) - mean, rstd, shift);
  };
  if (p.bias) {
    for_each_vector(p.columns, [&](int64_t n, int count) __attribute__((always_inline)) {
      const Vec v = normal(n, count);
      write(n, count, fma(v, load(p.weight + n, count), load(p.bias + n, count)));
    });
  } else {
    for_each_vector(p.columns, [&](int64_t n, int count) __attribute__((always_inline)) {
      write(n, count, normal(n, count) * load(p.weight + n, count));
    });
  }
}

template <class P>
FASTBERT_INLINE void keep_moments(const P& p, int64_t row, const Moments& m) {
  p.mean[row] = m.mean + m.correction;
  p.rstd[row] = m.rstd;
}

template <class Format, class XFormat, Summands kSummands>
void layer_norm_forward_rows(const LayerNormForward& params, int64_t begin, int64_t end,
                             float* scratch) {
  const LayerNormForward p = params;
  using Storage = typename Format::Storage;
  uint32_t* mask = scratch_mask(scratch, p.columns);
  for (int64_t row = begin; row < end; ++row) {
    const RowSum<Format, XFormat, kSummands, LayerNormForward> row_sum(p, row, mask);
    Vec totals[kSums] = {};
    const float* sum = fp32_row(row_sum, p.columns, scratch,
                                [&](int64_t, int u, int, Vec v)
                                    __attribute__((always_inline)) { totals[u] += v; });
    const Moments m = moments(sum, totals, p.columns, p.eps);
    Storage* y = (Storage*)p.y + row * p.columns;
    write_normalised(p, sum, m, [&](int64_t n, int count, Vec v) __attribute__((always_inline)) {
      Format::store(y + n, v, count);
    });
    keep_moments(p, row, m);
  }
}

void normalise(const RowNorm& params, int64_t begin, int64_t end) {
  const RowNorm p = params;
  with_format(p.format, [&](auto type) {
    using Format = decltype(type);
    for (int64_t row = begin; row < end; ++row) {
      const float* sums = p.sums + row * p.columns;
      Vec totals[kSums] = {};
      for_each_summand(p.columns, [&](int64_t n, int u, int count) __attribute__((always_inline)) {
        totals[u] += load(sums + n, count);
        __builtin_prefetch(sums + p.columns + n, 0, 3);
      });
      const Moments m = moments(sums, totals, p.columns, p.eps);
      auto* y = (typename Format::Storage*)p.y + row * p.columns;
      write_normalised(p, sums, m, [&](int64_t n, int count, Vec v) __attribute__((always_inline)) {
        Format::store(y + n, v, count);
      });
    }
  });
}

// The operands and results of one row of the backward. `finish` stores the gradient of the sum and,
// under dropout, the gradient of x, and returns the gradient of x.
template <class Format, class XFormat, Summands kSummands>
struct LayerNormRow {
  using P = LayerNormBackward;
  using Storage = typename Format::Storage;
  using XStorage = typename XFormat::Storage;
  static constexpr bool kHasXBias = kSummands == Summands::any;

  const Storage* dy;
  Storage* dsum;
  XStorage* dx;
  const uint32_t* mask;
  float scale;

  static FASTBERT_INLINE RowSum<Format, XFormat, kSummands, P> sum(const P& p, int64_t row,
                                                                   uint32_t* mask) {
    return RowSum<Format, XFormat, kSummands, P>(p, row, mask);
  }

  FASTBERT_INLINE void begin(const P& p, int64_t row, uint32_t* mask_memory) {
    const bool dropped = kSummands == Summands::any && p.dropout.enabled;
    dy = row_of<Storage>(p.dy, row);
    dsum = (Storage*)p.dsum + row * p.columns;
    dx = dropped ? (XStorage*)p.dx + row * p.columns : nullptr;
    mask = mask_memory;
    scale = p.dropout.scale;
  }

  FASTBERT_INLINE Vec gradient(int64_t n, int count) const { return Format::load(dy + n, count); }

  FASTBERT_INLINE Vec finish(int64_t n, Vec d, int count) const {
    Format::store(dsum + n, d, count);
    if (kSummands != Summands::any || !dx) return d;
    d = drop(d, mask + n, scale, count);
    XFormat::store(dx + n, d, count);
    return d;
  }
};

// The normalised row h, which is in scratch memory, and the means of g = dy * weight and of g h.
struct Normalised {
  const float* h;
  float rstd, g_mean, gh_mean;
};

template <class Row, class P>
FASTBERT_INLINE Normalised normalise_row(const P& p, Row& line, int64_t row, float* scratch) {
  uint32_t* mask = scratch_mask(scratch, p.columns);
  const auto row_sum = Row::sum(p, row, mask);
  line.begin(p, row, mask);
  const float mean = p.mean[row], rstd = p.rstd[row];
  Vec g_sum[kSums] = {}, gh_sum[kSums] = {};
  for_each_summand(p.columns, [&](int64_t n, int u, int count) __attribute__((always_inline)) {
    const Vec h = (row_sum(n, count) - mean) * rstd;
    const Vec g = line.gradient(n, count) * load(p.weight + n, count);
    store(scratch + n, h, count);
    g_sum[u] += g;
    gh_sum[u] = fma(g, h, gh_sum[u]);
  });
  return {scratch, rstd, (float)mean_of(g_sum, p.columns), (float)mean_of(gh_sum, p.columns)};
}

FASTBERT_INLINE void add_to(float* sums, Vec v, int count) {
  store(sums, load(sums, count) + v, count);
}

// The second pass of layer_norm_backward_block over the rows of a block. The function is compiled
// with and without a bias.
template <class Row, bool kHasBias, int kRows>
FASTBERT_INLINE void finish_block(const typename Row::P& p, const Row (&lines)[kRows],
                                  const Normalised (&rows)[kRows], float* sums) {
  float *dweight = sums, *dbias = sums + p.columns, *dx_bias = sums + (1 + kHasBias) * p.columns;
  for_each_vector(p.columns, [&](int64_t n, int count) __attribute__((always_inline)) {
    const Vec weight = load(p.weight + n, count);
    Vec dweight_sum = {}, dbias_sum = {}, dx_bias_sum = {};
    for (int i = 0; i < kRows; ++i) {
      const Normalised& row = rows[i];
      const Vec dy = lines[i].gradient(n, count), h = load(row.h + n, count);
      // g is rounded in the same way as in the computation of mean(g), so that g - mean(g) is
      // exactly 0 in a row with one column.
      const Vec g = dy * weight;
      const Vec d = fma(h, splat(-row.gh_mean), g - row.g_mean) * row.rstd;
      const Vec dx = lines[i].finish(n, d, count);
      dweight_sum = fma(dy, h, dweight_sum);
      if (kHasBias) dbias_sum += dy;
      if (Row::kHasXBias) dx_bias_sum += dx;
    }
    add_to(dweight + n, dweight_sum, count);
    if (kHasBias) add_to(dbias + n, dbias_sum, count);
    if (Row::kHasXBias) add_to(dx_bias + n, dx_bias_sum, count);
  });
}

// Computes dsum = rstd (g - mean(g) - h mean(g h)) of kRows rows, with the normalised row h and g =
// dy weight. Adds dy h to dweight, dy to dbias and dx to dx_bias.
template <class Row, int kRows>
FASTBERT_INLINE void layer_norm_backward_block(const typename Row::P& p, int64_t first,
                                               float* scratch, float* sums) {
  Row lines[kRows];
  Normalised rows[kRows];
  for (int i = 0; i < kRows; ++i) {
    float* memory = scratch + i * scratch_stride(p.columns);
    rows[i] = normalise_row(p, lines[i], first + i, memory);
  }
  p.has_bias ? finish_block<Row, true>(p, lines, rows, sums)
             : finish_block<Row, false>(p, lines, rows, sums);
}

// Divides the rows [begin, end) into groups of kGroupRows rows. Calls block(row) for each whole
// block of a group, and single(row) for each remaining row. After each group, the `length` fp32
// sums in `sums` are added to `partial`.
template <class Block, class Single>
FASTBERT_INLINE void for_each_group(int64_t begin, int64_t end, int64_t length, float* sums,
                                    double* partial, Block block, Single single) {
  for (int64_t row = begin; row < end;) {
    const int64_t group_end = end - row < kGroupRows ? end : row + kGroupRows;
    __builtin_memset(sums, 0, length * sizeof(float));
    for (; row + kBlockRows <= group_end; row += kBlockRows) block(row);
    for (; row < group_end; ++row) single(row);
    for_each_vector(length, [&](int64_t n, int count) __attribute__((always_inline)) {
      accumulate(partial + n, load(sums + n, count), count);
    });
  }
}

// Computes the backward of the rows [begin, end). `length` is the number of sums of parameter
// gradients, which is one to three times the number of columns. With dropout but without x_bias,
// the sums of dx are computed and not used.
template <class Row>
void layer_norm_backward_rows(const typename Row::P& params, int64_t length, int64_t begin,
                              int64_t end, float* scratch, double* partial) {
  const typename Row::P p = params;
  float* sums = scratch_sums(scratch, p.columns);
  for_each_group(
      begin, end, length, sums, partial,
      [&](int64_t row) __attribute__((always_inline)) {
        layer_norm_backward_block<Row, kBlockRows>(p, row, scratch, sums);
      },
      [&](int64_t row) __attribute__((always_inline)) {
        layer_norm_backward_block<Row, 1>(p, row, scratch, sums);
      });
}

// A type that stands for a value of Summands. with_row_types calls body(format, x_format, summands)
// with objects whose types stand for the formats and the operands in the params struct. If x is
// narrower than the residual, the value is Summands::any.
template <Summands kSummands>
struct SummandsConstant {
  static constexpr Summands value = kSummands;
};

template <class Format, class P, class Body>
FASTBERT_INLINE void with_summands(const P& p, Body body) {
  const Format f;
  if (p.x_bias || p.dropout.enabled) return body(f, f, SummandsConstant<Summands::any>{});
  if (p.residual.data) return body(f, f, SummandsConstant<Summands::x_and_residual>{});
  return body(f, f, SummandsConstant<Summands::x>{});
}

template <class P, class Body>
FASTBERT_INLINE void with_row_types(const P& p, Body body) {
  if (p.x_format != p.format) {
    constexpr SummandsConstant<Summands::any> kAny{};
    return p.x_format == Format::bf16 ? body(F32{}, BF16{}, kAny) : body(F32{}, F16{}, kAny);
  }
  with_format(p.format, [&](auto format) __attribute__((always_inline)) {
    with_summands<decltype(format)>(p, body);
  });
}

void layer_norm_forward(const LayerNormForward& p, int64_t begin, int64_t end, float* scratch) {
  with_row_types(p, [&](auto format, auto x_format, auto summands) {
    layer_norm_forward_rows<decltype(format), decltype(x_format), summands.value>(p, begin, end,
                                                                                  scratch);
  });
}

void layer_norm_backward(const LayerNormBackward& p, int64_t begin, int64_t end, float* scratch,
                         double* partial) {
  with_row_types(p, [&](auto format, auto x_format, auto summands) {
    using Row = LayerNormRow<decltype(format), decltype(x_format), summands.value>;
    const int64_t length = (1 + p.has_bias + (p.x_bias != nullptr)) * p.columns;
    layer_norm_backward_rows<Row>(p, length, begin, end, scratch, partial);
  });
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
