// The head of SPLADE (Formal et al. 2021, eq. 6): the maximum of log(1 + relu(logit)) over the
// tokens of a sequence, and the gradients.
//
// The function is increasing, and the bias of a class is the same for every token. The kernel
// therefore takes the maximum of the logits without their bias, and adds the bias and applies the
// function once for each sequence and class.

#pragma once

#include <cstdint>

#include "../isa/formats.h"
#include "../isa/kernels.h"
#include "../isa/vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

constexpr int kSpladeVectors = 4;  // registers of columns that are processed together

// Updates the running maxima of kCount registers of columns with the rows [begin, end).
template <int kCount>
FASTBERT_INLINE void splade_columns(const SpladeMaximum& p, int64_t n, int count, int64_t begin,
                                    int64_t end) {
  Vec highest[kCount];
  WordVec rows[kCount];
  for (int u = 0; u < kCount; ++u) {
    highest[u] = load(p.highest + n + u * kLanes, count);
    rows[u] = (WordVec)load((const float*)p.rows + n + u * kLanes, count);
  }
  for (int64_t row = begin; row < end; ++row) {
    const WordVec number = WordVec{} + (uint32_t)(p.first_row + row);
    for (int u = 0; u < kCount; ++u) {
      const Vec v = load(p.logits + row * p.stride + n + u * kLanes, count);
      // A NaN takes the place of every number, so that it reaches the result.
      const IntVec replaces = (v > highest[u]) | (v != v);
      highest[u] = select(replaces, v, highest[u]);
      rows[u] = choose(replaces, number, rows[u]);
    }
  }
  for (int u = 0; u < kCount; ++u) {
    store(p.highest + n + u * kLanes, highest[u], count);
    store((float*)p.rows + n + u * kLanes, (Vec)rows[u], count);
  }
}

void splade_maximum(const SpladeMaximum& params, int64_t begin, int64_t end) {
  const SpladeMaximum p = params;
  int64_t n = 0;
  for (; n + kSpladeVectors * kLanes <= p.columns; n += kSpladeVectors * kLanes) {
    splade_columns<kSpladeVectors>(p, n, kLanes, begin, end);
  }
  for (; n < p.columns; n += kLanes) {
    const int64_t left = p.columns - n;
    splade_columns<1>(p, n, left < kLanes ? (int)left : kLanes, begin, end);
  }
}

// Returns log(1 + x) for x > 0. u = 1 + x is rounded; (x - (u - 1)) / u corrects log(u) for this
// rounding error. The polynomial for log(1 + f), sqrt(1/2) - 1 <= f < sqrt(2) - 1, is that of logf
// in Cephes (Moshier 1989).
FASTBERT_INLINE Vec log1p_of_positive(Vec x) {
  const Vec u = x + 1.0f;
  const WordVec bits = (WordVec)u;
  const WordVec exponent = (bits - 0x3f3504f3u) >> 23;
  const Vec e = __builtin_convertvector((IntVec)exponent, Vec);
  const Vec f = (Vec)(bits - (exponent << 23)) - 1.0f;
  const float coefficients[] = {-1.1514610310e-1f, 1.1676998740e-1f,  -1.2420140846e-1f,
                                1.4249322787e-1f,  -1.6668057665e-1f, 2.0000714765e-1f,
                                -2.4999993993e-1f, 3.3333331174e-1f};
  Vec y = splat(7.0376836292e-2f);
  for (const float coefficient : coefficients) y = fma(y, f, splat(coefficient));
  const Vec square = f * f;
  y = y * f * square;
  y = fma(e, splat(-2.12194440e-4f), y) - square * 0.5f + (x - (u - 1.0f)) / u;
  const Vec log = fma(e, splat(0.693359375f), f + y);
  return select(x < __builtin_inff(), log, x);
}

template <class Format>
void splade_results(const SpladeResult& p) {
  for_each_vector(p.columns, [&](int64_t n, int count) __attribute__((always_inline)) {
    Vec logits = load(p.highest + n, count);
    if (p.bias) logits += load(p.bias + n, count);
    const IntVec positive = logits > 0.0f;
    // A NaN is not positive, and the result is NaN. Other logits that are not positive give 0.
    const Vec other = select(logits != logits, logits, Vec{});
    const Vec y = select(positive, log1p_of_positive(select(positive, logits, Vec{})), other);
    Format::store((typename Format::Storage*)p.y + n, y, count);
    if (!p.logits) return;
    store(p.logits + n, logits, count);
    const WordVec row = (WordVec)load((const float*)p.rows + n, count);
    store((float*)p.kept_rows + n, (Vec)choose(positive, row, WordVec{} - 1u), count);
  });
}

void splade_result(const SpladeResult& p) {
  with_format(p.format, [&](auto format) { splade_results<decltype(format)>(p); });
}

// Adds the rows of x that belong to one class, with their scales, to kCount registers from column n
// on, and stores the sums in the format `To`.
template <class From, class To, int kCount>
FASTBERT_INLINE void splade_sums(const SpladeGradient& p, int64_t of, int64_t n, int count) {
  const auto* x = (const typename From::Storage*)p.x.data + n;
  const float* scale = p.scale + of * p.sequences;
  const int32_t* rows = p.rows + of * p.sequences;
  Vec sums[kCount] = {};
  for (int64_t i = 0; i < p.sequences; ++i) {
    if (scale[i] == 0.0f) continue;
    const auto* row = x + rows[i] * p.x.stride;
    for (int u = 0; u < kCount; ++u) {
      sums[u] = fma(splat(scale[i]), From::load(row + u * kLanes, count), sums[u]);
    }
  }
  auto* out = (typename To::Storage*)p.out + of * p.columns + n;
  for (int u = 0; u < kCount; ++u) To::store(out + u * kLanes, sums[u], count);
}

// Sets row v of `out`, for begin <= v < end, to the sum over the sequences i of scale[v, i] times
// the row rows[v, i] of x.
void splade_weight_gradient(const SpladeGradient& params, int64_t begin, int64_t end) {
  const SpladeGradient p = params;
  with_format(p.format, [&](auto from) {
    with_format(p.out_format, [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      for (int64_t v = begin; v < end; ++v) {
        int64_t n = 0;
        for (; n + kSpladeVectors * kLanes <= p.columns; n += kSpladeVectors * kLanes) {
          splade_sums<From, To, kSpladeVectors>(p, v, n, kLanes);
        }
        for (; n < p.columns; n += kLanes) {
          const int64_t left = p.columns - n;
          splade_sums<From, To, 1>(p, v, n, left < kLanes ? (int)left : kLanes);
        }
      }
    });
  });
}

// Adds the terms of the classes [begin, end) to the columns [n, n + width) of the rows of `sums`.
template <class From>
void splade_scatter(const SpladeGradient& p, int64_t begin, int64_t end, int64_t n, int width,
                    float* sums) {
  for (int64_t v = begin; v < end; ++v) {
    const auto* x = (const typename From::Storage*)p.x.data + v * p.x.stride + n;
    const float* scale = p.scale + v * p.sequences;
    const int32_t* rows = p.rows + v * p.sequences;
    for (int64_t i = 0; i < p.sequences; ++i) {
      if (scale[i] == 0.0f) continue;
      float* sum = sums + rows[i] * kSpladeStrip;
      for (int j = 0; j < width; j += kLanes) {
        const int count = width - j < kLanes ? width - j : kLanes;
        store(sum + j, fma(splat(scale[i]), From::load(x + j, count), load(sum + j)));
      }
    }
  }
}

// Adds to the row rows[v, i] of `out`, for every class v and sequence i, scale[v, i] times row v of
// x. `out` is fp32. A unit of work is a strip of kSpladeStrip columns. The terms of kSpladeClasses
// classes are summed in `scratch` first, because long chains of additions lose accuracy.
void splade_hidden_gradient(const SpladeGradient& params, int64_t begin, int64_t end,
                            float* scratch) {
  constexpr int64_t kSpladeClasses = 1024;
  const SpladeGradient p = params;
  for (int64_t strip = begin; strip < end; ++strip) {
    const int64_t n = strip * kSpladeStrip, left = p.columns - n;
    const int width = (int)(left < kSpladeStrip ? left : kSpladeStrip);
    for (int64_t first = 0; first < p.classes; first += kSpladeClasses) {
      const int64_t last = first + kSpladeClasses < p.classes ? first + kSpladeClasses : p.classes;
      for (int64_t i = 0; i < p.out_rows * kSpladeStrip; i += kLanes) store(scratch + i, Vec{});
      with_format(p.format, [&](auto from) {
        splade_scatter<decltype(from)>(p, first, last, n, width, scratch);
      });
      for (int64_t row = 0; row < p.out_rows; ++row) {
        float* out = (float*)p.out + row * p.columns + n;
        const float* sum = scratch + row * kSpladeStrip;
        for (int j = 0; j < width; j += kLanes) {
          const int count = width - j < kLanes ? width - j : kLanes;
          store(out + j, load(out + j, count) + load(sum + j, count), count);
        }
      }
    }
  }
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
