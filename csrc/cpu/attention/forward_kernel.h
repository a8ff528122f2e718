// Attention forward with a running softmax (Milakov and Gimelshein 2018; Dao 2023,
// "FlashAttention-2").
//
// An item of work packs each block of keys and values into panels once. All queries of the item are
// then multiplied by this block, one block of queries at a time. Each block updates the running
// softmax, so only one block of scores is in memory. The result of a row depends on the row's own
// sequence alone. Blocks of keys begin at multiples of kKeys, and a block of keys does not change a
// row whose query attends to none of these keys.

#pragma once

#include "relative.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// Sets mask[n] for n < keys: to all ones if dropout keeps the weight between query `query` and key
// `key` + n, and to 0 if dropout drops the weight.
inline void attention_dropout(const Dropout& dropout, const Head& h, int64_t query, int64_t key,
                              int64_t keys, uint32_t* mask) {
  const WordVec lane = lane_numbers();
  const WordVec order = (lane & 3u) * (uint32_t)(kLanes / 4) + (lane >> 2);
  for (int64_t n = 0; n < keys; n += 4 * kLanes) {
    WordVec words[4] = {order + (uint32_t)((key + n) / 4), WordVec{} + (uint32_t)query,
                        WordVec{} + (uint32_t)h.head, WordVec{} + (uint32_t)h.sequence};
    philox(dropout.key, words);
    transpose_blocks(words);
    for (int j = 0; j < 4; ++j) {
      const IntVec kept = (IntVec)((words[j] >> 8) >= dropout.threshold);
      __builtin_memcpy(mask + n + j * kLanes, &kept, kBytes);
    }
  }
}

// Overwrites a row of logits with exp(logit - maximum), and returns the sum of the exponentials.
inline float exponentials(float* scores, int64_t width, float maximum) {
  const Vec reference = splat(maximum);
  Vec sum[2] = {};
  for (int64_t n = 0; n < width; n += kPanel) {
    for (int i = 0; i < 2; ++i) {
      const Vec e = exp_minus(reference - load(scores + n + i * kLanes));
      store(scores + n + i * kLanes, e);
      sum[i] += e;
    }
  }
  return total(sum[0] + sum[1]);
}

inline void drop_row(float* weights, int64_t width, const uint32_t* kept, float scale) {
  for (int64_t n = 0; n < width; n += kLanes) {
    store(weights + n, drop(load(weights + n), kept + n, scale, kLanes));
  }
}

// The state of the running softmax for the rows of a block of queries. For each row, `maximum` has
// the largest logit and `sum` has the sum of exponentials, over the blocks of keys that have been
// processed so far.
struct Running {
  float *maximum, *sum;
};

// Overwrites one block of logits with weights that are not yet divided by their sum, and updates
// `running`. Writes one factor for each row to `factors`. The caller must multiply the row's result
// from earlier blocks of keys by this factor.
inline void running_softmax(const Attention& a, const Head& h, const Block& block, float* scores,
                            int64_t stride, const float* maxima, Running running, float* factors) {
  const int64_t width = whole_panels(block.keys);
  alignas(64) uint32_t kept[kKeys];
  for (int64_t r = 0; r < block.rows; ++r) {
    const float before = running.maximum[r];
    const float after = maxima[r] > before ? maxima[r] : before;
    // If a row has not attended to any key so far, `after` is -inf. The reference is then 0,
    // because the difference of two infinities would be NaN.
    const float reference = after == -kInfinity ? 0.0f : after;
    factors[r] = exp_minus(reference - before);
    const float sum = exponentials(scores + r * stride, width, reference);
    running.sum[r] = running.sum[r] * factors[r] + sum;
    running.maximum[r] = after;
    if (a.dropout.enabled) {
      attention_dropout(a.dropout, h, block.position(r), block.key, block.keys, kept);
      drop_row(scores + r * stride, width, kept, a.dropout.scale);
    }
  }
}

struct ForwardMemory {
  uint32_t *used, *begun;  // begun[i]: whether `out` has a result for block i of queries
  float *q, *out, *maximum, *sum, *keys, *values, *scores, *maxima, *factors;
  char* relative;

  ForwardMemory(const Attention& a, int64_t rows, Arena& arena) {
    const int64_t width = whole_panels(a.head_dim);
    used = arena.take<uint32_t>(a.max_k);
    begun = arena.take<uint32_t>(rows / kQueries + 1);
    q = arena.take<float>(rows * width);
    out = arena.take<float>(rows * width);
    maximum = arena.take<float>(rows);
    sum = arena.take<float>(rows);
    keys = arena.take<float>(kKeys * a.head_dim);
    values = arena.take<float>(kKeys * width);
    scores = arena.take<float>(kQueries * kScoreStride);
    maxima = arena.take<float>(kQueries);
    factors = arena.take<float>(kQueries);
    relative = arena.take<char>(relative_scratch(a, rows, false));
  }
};

inline int64_t attention_scratch(const Attention& a, int64_t rows) {
  Arena arena = {nullptr};
  ForwardMemory(a, rows, arena);
  return (int64_t)(arena.next - (char*)nullptr);
}

// Adds the contribution of a block of keys to the results of a block of queries. If `begins`, no
// earlier block has contributed, and the contribution overwrites the results.
inline void forward_block(const Attention& a, const Head& h, const Block& block,
                          const ForwardMemory& m, int64_t first, bool begins) {
  const int64_t width = whole_panels(a.head_dim);
  logits(a, h, block, m.q + first * width, m.keys, m.scores, kScoreStride, m.maxima);
  running_softmax(a, h, block, m.scores, kScoreStride, m.maxima, {m.maximum + first, m.sum + first},
                  m.factors);
  const Left weights = {m.scores, kScoreStride, 1};
  float* out = m.out + first * width;
  if (begins) {
    product<Update::store>(weights, block.rows, m.values, kKeys * kPanel, width / kPanel,
                           block.keys, out, width);
  } else {
    product<Update::rescale>(weights, block.rows, m.values, kKeys * kPanel, width / kPanel,
                             block.keys, out, width, m.factors);
  }
}

template <class F, class Memory>
void forward_results(const Attention& a, const Head& h, const AttentionItem& item,
                     const Memory& m) {
  const int64_t width = whole_panels(a.head_dim);
  auto* out = first_row<F>(a, h, a.out, h.q_start) + item.begin * a.out.row;
  float* lse = statistic(a, h, a.lse) + item.begin;
  for (int64_t r = 0; r < item.end - item.begin; ++r) {
    const bool empty = m.sum[r] == 0.0f;
    const float sum = empty ? 1.0f : m.sum[r];
    lse[r] = empty ? -kInfinity : m.maximum[r] + __builtin_logf(sum);
    const float inverse = 1.0f / sum;
    for_each_vector(a.head_dim, [&](int64_t n, int count) {
      const Vec x = load(m.out + r * width + n);
      // Dividing by the sum rounds once. Multiplying by the inverse is faster, but rounds twice.
      // Results in 16 bits use the multiplication, because its additional rounding error is far
      // below the error of the conversion to 16 bits.
      const Vec y = sizeof(typename F::Storage) == 2 ? x * inverse : x / sum;
      F::store(out + r * a.out.row + n, empty ? Vec{} : y, count);
    });
  }
}

template <class F>
void forward_item(const Attention& a, const AttentionItem& item, void* scratch) {
  Arena arena = {(char*)scratch};
  const int64_t rows = item.end - item.begin;
  const ForwardMemory m(a, rows, arena);
  Head h = head_of(a, item.sequence, item.head);
  h.used = used_keys(a, h, m.used);
  const OptionalTables<F> tables(a, h, item.begin, rows, m.relative);
  h.relative = tables.get();
  const auto* q = first_row<F>(a, h, a.q, h.q_start) + item.begin * a.q.row;
  const auto* k = first_row<F>(a, h, a.k, h.k_start);
  const auto* v = first_row<F>(a, h, a.v, h.k_start);
  copy_rows<F>({q, a.q.row, nullptr}, rows, a.head_dim, m.q);
  for (int64_t r = 0; r < rows; ++r) {
    m.maximum[r] = -kInfinity;
    m.sum[r] = 0.0f;
    m.begun[r / kQueries] = 0;
  }
  const Range seen = visible_keys(a, h, item.begin, item.end - 1);
  for (int64_t key = seen.low / kKeys * kKeys; key < seen.high; key += kKeys) {
    const int64_t keys = clamp(h.k_length - key, 0, kKeys);
    if (!any_used(h, key, key + keys)) continue;
    const uint32_t* used = h.used == nullptr ? nullptr : h.used + key;
    pack_rows<F>({k + key * a.k.row, a.k.row, used}, keys, a.head_dim, m.keys);
    pack_columns<F>({v + key * a.v.row, a.v.row, used}, keys, a.head_dim, kKeys, m.values);
    for (int64_t first = 0; first < rows; first += kQueries) {
      const Block block = {item.begin + first, clamp(rows - first, 0, kQueries), key, keys,
                           nullptr};
      const Range range = visible_keys(a, h, block.query, block.query + block.rows - 1);
      if (key >= range.high || key + keys <= range.low) continue;
      uint32_t& begun = m.begun[first / kQueries];
      forward_block(a, h, block, m, first, begun == 0);
      begun = 1;
    }
  }
  forward_results<F>(a, h, item, m);
}

inline void attention_forward(const Attention& a, const AttentionItem& item, void* scratch) {
  if (a.format == Format::f32) return forward_item<F32>(a, item, scratch);
  if (a.format == Format::bf16) return forward_item<BF16>(a, item, scratch);
  forward_item<F16>(a, item, scratch);
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
