// Softmax over a vocabulary in parts: the running maximum and sum of exponentials of each row
// (Milakov and Gimelshein 2018) and, after the last part, the gradient of the logits.
//
// The forward stores both the maximum and the sum instead of their log-sum-exp. The rounding error
// of the log-sum-exp would be as large as the rounding error of a logit. For logits near 1e4, this
// error changes a probability by a factor of 1 + 5e-4.

#pragma once

#include "../isa/exp.h"
#include "../isa/formats.h"
#include "../isa/kernels.h"
#include "../isa/vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// The initial value of a running maximum. The value is finite, because the difference of a logit of
// -inf and a maximum of -inf would be NaN.
constexpr float kLowest = -2.0e38f;

// Returns exp(v - highest), which is NaN where v is NaN.
FASTBERT_INLINE Vec exp_below(Vec v, Vec highest) {
  return select(v == v, exp_negative(highest - v), v);
}

// Returns `count` logits of a row, from class n on, with their bias.
template <class P>
FASTBERT_INLINE Vec biased(const P& p, const float* logits, int64_t n, int count) {
  const Vec v = load(logits + n, count);
  return p.bias ? v + load(p.bias + n, count) : v;
}

FASTBERT_INLINE float highest_of(const Vec (&vectors)[kSums]) {
  float highest = kLowest;
  for (int u = 0; u < kSums; ++u) {
    for (int i = 0; i < kLanes; ++i) {
      if (vectors[u][i] > highest) highest = vectors[u][i];
    }
  }
  return highest;
}

void cross_entropy_forward(const CrossEntropyForward& params, int64_t begin, int64_t end) {
  const CrossEntropyForward p = params;  // RowSum (layer_norm_kernel.h) explains this copy.
  for (int64_t row = begin; row < end; ++row) {
    const float* logits = p.logits + row * p.columns;
    Vec highs[kSums];
    for (int u = 0; u < kSums; ++u) highs[u] = splat(kLowest);
    for_each_summand(p.columns, [&](int64_t n, int u, int count) __attribute__((always_inline)) {
      const Vec v = first_lanes(biased(p, logits, n, count), count, splat(kLowest));
      highs[u] = select(v > highs[u], v, highs[u]);
    });
    const float before = p.highest[row], own = highest_of(highs);
    const float highest = own > before ? own : before;
    Vec sums[kSums] = {};
    for_each_summand(p.columns, [&](int64_t n, int u, int count) __attribute__((always_inline)) {
      const Vec e = exp_below(biased(p, logits, n, count), splat(highest));
      sums[u] += first_lanes(e, count);
    });
    const float rescale = exp_negative(splat(highest - before))[0];
    const double sum = mean_of(sums, 1);
    p.total[row] = (float)((double)p.total[row] * rescale + sum);
    p.highest[row] = highest;
    const int64_t label = p.labels[row] - p.first;
    if (label >= 0 && label < p.columns) p.own[row] = logits[label] + (p.bias ? p.bias[label] : 0);
  }
}

// Overwrites the logits with scale (softmax - onehot). If `rounded` is not null, the result is also
// written to `rounded` in the format `Format`.
template <class Format>
void cross_entropy_backward_rows(const CrossEntropyBackward& params, int64_t begin, int64_t end) {
  const CrossEntropyBackward p = params;
  using Storage = typename Format::Storage;
  for (int64_t row = begin; row < end; ++row) {
    float* logits = p.logits + row * p.columns;
    const Vec highest = splat(p.highest[row]);
    const float scale = p.scale[row], share = scale / p.total[row];
    for_each_vector(p.columns, [&](int64_t n, int count) __attribute__((always_inline)) {
      store(logits + n, exp_below(biased(p, logits, n, count), highest) * share, count);
    });
    // With the softmax p and the scale g, p g - g is used instead of (p - 1) g. If p is small, the
    // second form has two rounding errors of the same size, and the first form has one.
    const int64_t label = p.labels[row] - p.first;
    if (label >= 0 && label < p.columns) logits[label] -= scale;
    if (!p.rounded) continue;
    Storage* rounded = (Storage*)p.rounded + row * p.columns;
    for_each_vector(p.columns, [&](int64_t n, int count) __attribute__((always_inline)) {
      Format::store(rounded + n, load(logits + n, count), count);
    });
  }
}

void cross_entropy_backward(const CrossEntropyBackward& p, int64_t begin, int64_t end) {
  with_format(p.format,
              [&](auto format) { cross_entropy_backward_rows<decltype(format)>(p, begin, end); });
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
