// Attention of single queries over cached keys and values, for the steps of a decoder.
//
// A query is alone with its keys, so packing the keys for a product, as attention forward does,
// would take more time than the product. The lanes of a register hold neighbouring elements of a
// head instead, and a block of kLanes keys is reduced to one register of scores.

#pragma once

#include "../isa/transpose.h"
#include "forward_kernel.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// Returns the rows of keys or values of a query's head, at one position.
template <class F>
FASTBERT_INLINE const typename F::Storage* cached_row(const DecodeAttention& a,
                                                      const ConstRows& rows, int64_t query,
                                                      int64_t head, int64_t position) {
  const int64_t slot = a.slots ? a.slots[query * a.slots_row + position] : 0;
  return (const typename F::Storage*)rows.data + slot * rows.batch + head * rows.head +
         position * rows.row;
}

// Writes the logits of the query's keys to `scores`, and -inf up to the end of the last panel.
// Returns the largest logit.
template <class F>
FASTBERT_INLINE float cached_logits(const DecodeAttention& a, int64_t query, int64_t head,
                                    const float* q, float* scores) {
  const int64_t begin = a.begin[query], keys = a.end[query] - begin;
  Vec maximum = splat(-kInfinity);
  for (int64_t n = 0; n < whole_panels(keys); n += kLanes) {
    const typename F::Storage* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int64_t key = n + i < keys ? n + i : keys - 1;
      rows[i] = cached_row<F>(a, a.k, query, head, begin + key);
    }
    Vec partial[kLanes] = {};
    for_each_vector(a.head_dim, [&](int64_t d, int count) __attribute__((always_inline)) {
      const Vec own = load(q + d);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        partial[i] = fma(own, F::load(rows[i] + d, count), partial[i]);
      }
    });
    transpose(partial);
#pragma GCC unroll 4
    for (int step = kLanes / 2; step > 0; step /= 2) {
      for (int i = 0; i < step; ++i) partial[i] += partial[i + step];
    }
    const IntVec valid = (IntVec)lane_numbers() < IntVec{} + (int32_t)(keys - n);
    const Vec logits = select(valid, partial[0] * a.scale, splat(-kInfinity));
    store(scores + n, logits);
    maximum = select(logits > maximum, logits, maximum);
  }
  return largest(maximum);
}

// Writes kVectors registers of the result: the sum of the values' rows, multiplied by `weights` and
// divided by `sum`. Terms are added in blocks of kKeys keys. The last register has `lanes` elements
// of the head, and the others are full.
template <class F, int kVectors>
FASTBERT_INLINE void cached_values(const DecodeAttention& a, int64_t query, int64_t head, int64_t d,
                                   int lanes, const float* weights, float sum,
                                   typename F::Storage* out) {
  const int64_t begin = a.begin[query], keys = a.end[query] - begin;
  const auto count = [&](int j) __attribute__((always_inline)) {
    return j + 1 < kVectors ? kLanes : lanes;
  };
  Vec total[kVectors] = {};
  for (int64_t first = 0; first < keys; first += kKeys) {
    const int64_t last = clamp(keys, first, first + kKeys);
    Vec part[kVectors] = {};
    for (int64_t n = first; n < last; ++n) {
      const auto* row = cached_row<F>(a, a.v, query, head, begin + n) + d;
      const Vec weight = splat(weights[n]);
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) {
        part[j] = fma(weight, F::load(row + j * kLanes, count(j)), part[j]);
      }
    }
    for (int j = 0; j < kVectors; ++j) total[j] += part[j];
  }
  for (int j = 0; j < kVectors; ++j) F::store(out + d + j * kLanes, total[j] / sum, count(j));
}

// Computes the result of one head of one query.
template <class F>
void decode_head(const DecodeAttention& a, int64_t query, int64_t head, float* scratch) {
  const auto* stored =
      (const typename F::Storage*)a.q.data + query * a.q.stride + head * a.head_dim;
  auto* out = (typename F::Storage*)a.out + (query * a.heads + head) * a.head_dim;
  float *q = scratch, *scores = scratch + whole_panels(a.head_dim);
  const int64_t keys = a.end[query] - a.begin[query];
  for_each_vector(a.head_dim, [&](int64_t d, int count) __attribute__((always_inline)) {
    store(q + d, F::load(stored + d, count));
    if (keys <= 0) F::store(out + d, Vec{}, count);
  });
  if (keys <= 0) return;
  const float maximum = cached_logits<F>(a, query, head, q, scores);
  float sum = 0.0f;
  for (int64_t n = 0; n < keys; n += kKeys) {
    sum += exponentials(scores + n, whole_panels(clamp(keys - n, 0, kKeys)), maximum);
  }
  int64_t d = 0;
  const auto take = [&](auto vectors) __attribute__((always_inline)) {
    constexpr int kVectors = decltype(vectors)::value;
    for (; a.head_dim - d >= kVectors * kLanes; d += kVectors * kLanes) {
      cached_values<F, kVectors>(a, query, head, d, kLanes, scores, sum, out);
    }
  };
  take(Count<8>{});
  take(Count<4>{});
  take(Count<1>{});
  if (d < a.head_dim) {
    cached_values<F, 1>(a, query, head, d, (int)(a.head_dim - d), scores, sum, out);
  }
}

// Returns the number of floats of scratch memory for queries with up to `keys` keys.
int64_t decode_scratch(const DecodeAttention& a, int64_t keys) {
  return whole_panels(a.head_dim) + whole_panels(keys);
}

void decode_attention(const DecodeAttention& params, int64_t begin, int64_t end, float* scratch) {
  const DecodeAttention a = params;  // RowSum (layer_norm_kernel.h) explains this copy.
  with_format(a.format, [&](auto format) {
    for (int64_t unit = begin; unit < end; ++unit) {
      decode_head<decltype(format)>(a, unit / a.heads, unit % a.heads, scratch);
    }
  });
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
