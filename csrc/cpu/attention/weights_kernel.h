// The kernel that writes the softmax weights of attention, for chosen queries of a head. All logits
// of a row are in memory at the same time, so no running softmax is needed.

#pragma once

#include "forward_kernel.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// The largest number of queries that are processed at a time. It is smaller than kQueries, because
// whole rows of logits need more memory than blocks of logits.
constexpr int64_t kWeightRows = 24;

struct WeightsMemory {
  uint32_t* used;
  int64_t stride;
  float *q, *keys, *scores, *maximum, *maxima;
  char* relative;

  WeightsMemory(const Attention& a, Arena& arena) {
    used = arena.take<uint32_t>(a.max_k);
    stride = (a.max_k + kKeys - 1) / kKeys * kKeys + 16;
    q = arena.take<float>(kWeightRows * whole_panels(a.head_dim));
    keys = arena.take<float>(kKeys * a.head_dim);
    scores = arena.take<float>(kWeightRows * stride);
    maximum = arena.take<float>(kWeightRows);
    maxima = arena.take<float>(kWeightRows);
    relative = arena.take<char>(relative_scratch(a, kWeightRows, false));
  }
};

int64_t attention_weights_scratch(const Attention& a) {
  Arena arena = {nullptr};
  WeightsMemory(a, arena);
  return (int64_t)(arena.next - (char*)nullptr);
}

template <class F>
void write_weights(const Attention& a, const Head& h, const WeightsMemory& m, int64_t row,
                   typename F::Storage* out) {
  float* scores = m.scores + row * m.stride;
  const bool empty = m.maximum[row] == -kInfinity;
  const Vec maximum = splat(empty ? 0.0f : m.maximum[row]);
  Vec sum = {};
  for_each_vector(h.k_length, [&](int64_t n, int count) {
    const Vec e = first_lanes(exp_minus(maximum - load(scores + n)), count);
    store(scores + n, e);
    sum += e;
  });
  const Vec divisor = splat(empty ? 1.0f : total(sum));
  for_each_vector(h.k_length, [&](int64_t n, int count) {
    F::store(out + n, load(scores + n) / divisor, count);
  });
}

template <class F>
void weights_item(const Attention& a, const AttentionItem& item, const int64_t* queries,
                  typename F::Storage* out, void* scratch) {
  Arena arena = {(char*)scratch};
  const WeightsMemory m(a, arena);
  Head h = head_of(a, item.sequence, item.head);
  h.used = used_keys(a, h, m.used);
  const int64_t width = whole_panels(a.head_dim);
  const auto* q = first_row<F>(a, h, a.q, h.q_start);
  const auto* k = first_row<F>(a, h, a.k, h.k_start);
  for (int64_t i = 0; i < (item.end - item.begin) * a.max_k; ++i) out[i] = 0;
  int64_t last = item.end;  // Queries after the end of the sequence have weights of 0.
  while (last > item.begin && queries[last - 1] >= h.q_length) --last;
  int64_t rows;
  for (int64_t begin = item.begin; begin < last; begin += rows) {
    rows = clamp(last - begin, 0, kWeightRows);
    // Tables of relative positions are gathered for consecutive queries.
    for (int64_t r = 1; r < rows && a.relative != nullptr; ++r) {
      if (queries[begin + r] != queries[begin] + r) rows = r;
    }
    const OptionalTables<F> tables(a, h, queries[begin], rows, m.relative);
    h.relative = tables.get();
    for (int64_t r = 0; r < rows; ++r) {
      m.maximum[r] = -kInfinity;
      copy_rows<F>({q + queries[begin + r] * a.q.row, a.q.row, nullptr}, 1, a.head_dim,
                   m.q + r * width);
    }
    for (int64_t key = 0; key < h.k_length; key += kKeys) {
      const int64_t keys = clamp(h.k_length - key, 0, kKeys);
      const uint32_t* used = h.used == nullptr ? nullptr : h.used + key;
      pack_rows<F>({k + key * a.k.row, a.k.row, used}, keys, a.head_dim, m.keys);
      const Block block = {queries[begin], rows, key, keys, queries + begin};
      logits(a, h, block, m.q, m.keys, m.scores + key, m.stride, m.maxima);
      for (int64_t r = 0; r < rows; ++r) {
        m.maximum[r] = m.maxima[r] > m.maximum[r] ? m.maxima[r] : m.maximum[r];
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      write_weights<F>(a, h, m, r, out + (begin - item.begin + r) * a.max_k);
    }
  }
}

void attention_weights(const Attention& a, const AttentionItem& item, const int64_t* queries,
                       void* out, void* scratch) {
  if (a.format == Format::f32) return weights_item<F32>(a, item, queries, (float*)out, scratch);
  if (a.format == Format::bf16) {
    return weights_item<BF16>(a, item, queries, (uint16_t*)out, scratch);
  }
  weights_item<F16>(a, item, queries, (uint16_t*)out, scratch);
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
