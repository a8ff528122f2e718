// Attention backward without atomic additions, so that every sum has a fixed order. The formulas
// are those of Dao 2023, "FlashAttention-2".
//
// P denotes the softmax weights before dropout. With the gradient of these weights, dP =
// dropout(dout vᵀ), and with the sums over keys delta = rowsum(P dP), where products are
// elementwise, the gradients are:
//
//     dS = P (dP - delta),   dq = dS k scale,   dk = dSᵀ q scale,   dv = dropout(P)ᵀ dout
//
// For each row of logits, the kernel computes the maximum and the sum of the exponentials again.
// The forward stores only the log-sum-exp of a row in fp32, and the rounding error of this number
// would appear in every weight of the row. delta is also computed here, from the same values of dP
// as dS. Where one weight is nearly 1, dP is nearly equal to delta, and a delta from other values
// would leave mostly rounding error in dP - delta.
//
// dq is summed over the blocks of keys in order, and dk and dv are summed over the blocks of
// queries in order. An item usually computes all three gradients of a whole head. A long head is
// divided into items that compute the statistics and dq of some queries, followed by items that
// compute dk and dv of some keys. The blocks and their order are the same with and without this
// division, so the gradients have the same bits.

#pragma once

#include "forward_kernel.h"
#include "relative_backward.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// A block of queries makes two passes over the keys of the item: the first for the statistics, and
// the second for the gradients. An item that reads stored statistics makes only the second pass.
// With at most kKeptKeys keys, the logits and dP of the first pass stay in memory for the second
// pass. With more keys, the second pass computes the logits and dP again.
constexpr int64_t kKeptKeys = 1024;

struct BackwardMemory {
  uint32_t *used, *kept;
  float *keys_for_q, *keys, *values, *dk, *dv;  // all keys of the item
  float *q, *dout, *q_columns, *dout_columns;   // one block of queries
  float *dq, *maximum, *sum, *delta, *maxima;
  float *scores, *dweights;
  float* dsegment_scores;
  char* relative;
  // `stride` is the number of elements between rows of `scores`, and also of `dweights`.
  // `kept_keys` is the number of columns of both if the second pass reads the logits of the first
  // pass, and 0 if the second pass computes the logits again.
  int64_t stride, kept_keys;

  BackwardMemory(const AttentionBackward& p, int64_t item_keys, Arena& arena) {
    const Attention& a = p.forward;
    const int64_t width = whole_panels(a.head_dim), all = (item_keys + kKeys - 1) / kKeys * kKeys;
    used = arena.take<uint32_t>(a.max_k);
    kept = arena.take<uint32_t>(kKeys);
    keys_for_q = arena.take<float>(all * a.head_dim);
    values = arena.take<float>(all * a.head_dim);
    keys = arena.take<float>(all * width);
    dk = arena.take<float>(all * width);
    dv = arena.take<float>(all * width);
    q = arena.take<float>(kQueries * width);
    dout = arena.take<float>(kQueries * width);
    q_columns = arena.take<float>(kQueries * width);
    dout_columns = arena.take<float>(kQueries * width);
    dq = arena.take<float>(kQueries * width);
    maximum = arena.take<float>(kQueries);
    sum = arena.take<float>(kQueries);
    delta = arena.take<float>(kQueries);
    maxima = arena.take<float>(kQueries);
    kept_keys = all <= kKeptKeys ? all : 0;
    stride = kept_keys != 0 ? kept_keys + 16 : kScoreStride;
    scores = arena.take<float>(kQueries * stride);
    dweights = arena.take<float>(kQueries * stride);
    dsegment_scores = arena.take<float>(kQueries);
    relative = arena.take<char>(relative_scratch(a, a.max_q, true));
  }
};

int64_t attention_backward_scratch(const AttentionBackward& p, int64_t keys) {
  Arena arena = {nullptr};
  BackwardMemory(p, keys, arena);
  return (int64_t)(arena.next - (char*)nullptr);
}

// The state of one item: the keys [keys.low, keys.high) of a head, packed in panels, and one block
// of queries.
template <class F>
struct Backward {
  const AttentionBackward& p;
  const Attention& a;
  Head h;
  BackwardMemory m;
  OptionalTables<F> tables;
  Range keys;
  int64_t width;

  Backward(const AttentionBackward& problem, int64_t sequence, int64_t head, Arena& arena,
           Range item_keys)
      : p(problem),
        a(problem.forward),
        h(head_of(problem.forward, sequence, head)),
        m(problem, item_keys.high - item_keys.low, arena),
        tables(a, h, 0, h.q_length, m.relative, true),
        keys(item_keys),
        width(whole_panels(problem.forward.head_dim)) {
    h.used = used_keys(a, h, m.used);
    h.relative = tables.get();
    const int64_t count = keys.high - keys.low;
    const uint32_t* used = h.used == nullptr ? nullptr : h.used + keys.low;
    const auto* k = first_row<F>(a, h, a.k, h.k_start) + keys.low * a.k.row;
    const auto* v = first_row<F>(a, h, a.v, h.k_start) + keys.low * a.v.row;
    pack_rows<F>({k, a.k.row, used}, count, a.head_dim, m.keys_for_q);
    pack_rows<F>({v, a.v.row, used}, count, a.head_dim, m.values);
    pack_columns<F>({k, a.k.row, used}, count, a.head_dim, all(), m.keys);
  }

  int64_t all() const { return (keys.high - keys.low + kKeys - 1) / kKeys * kKeys; }

  void load_queries(int64_t query, int64_t rows) {
    const auto* q = first_row<F>(a, h, a.q, h.q_start) + query * a.q.row;
    const auto* dout = first_row<F>(a, h, p.dout, h.q_start) + query * p.dout.row;
    copy_rows<F>({q, a.q.row, nullptr}, rows, a.head_dim, m.q);
    copy_rows<F>({dout, p.dout.row, nullptr}, rows, a.head_dim, m.dout);
    pack_columns<F>({q, a.q.row, nullptr}, rows, a.head_dim, kQueries, m.q_columns);
    pack_columns<F>({dout, p.dout.row, nullptr}, rows, a.head_dim, kQueries, m.dout_columns);
  }

  // Returns the range of the item's keys that are inside the window of a block of queries. The
  // start of the range is rounded down to the start of a block of keys.
  Range seen(int64_t query, int64_t rows) const {
    const Range range = visible_keys(a, h, query, query + rows - 1);
    const int64_t high = clamp(range.high, keys.low, keys.high);
    return {clamp(range.low / kKeys * kKeys, keys.low, high), high};
  }

  template <class Body>
  void for_each_block(int64_t query, int64_t rows, const Body& body) const {
    const Range range = seen(query, rows);
    for (int64_t key = range.low; key < range.high; key += kKeys) {
      const int64_t count = clamp(h.k_length - key, 0, kKeys);
      if (any_used(h, key, key + count)) body(Block{query, rows, key, count, nullptr});
    }
  }

  float* scores(const Block& block) const {
    return m.scores + (m.kept_keys != 0 ? block.key - keys.low : 0);
  }

  float* dweights(const Block& block) const {
    return m.dweights + (m.kept_keys != 0 ? block.key - keys.low : 0);
  }

  // Computes the logits and dP = dropout(dout vᵀ) of a block.
  void products(const Block& block) const {
    const int64_t at = (block.key - keys.low) * a.head_dim, columns = whole_panels(block.keys);
    logits(a, h, block, m.q, m.keys_for_q + at, scores(block), m.stride, m.maxima);
    float* dp = dweights(block);
    product<Update::store>({m.dout, width, 1}, block.rows, m.values + at, a.head_dim * kPanel,
                           columns / kPanel, a.head_dim, dp, m.stride);
    if (!a.dropout.enabled) return;
    for (int64_t r = 0; r < block.rows; ++r) {
      attention_dropout(a.dropout, h, block.query + r, block.key, block.keys, m.kept);
      drop_row(dp + r * m.stride, columns, m.kept, a.dropout.scale);
    }
  }

  void find_statistics(int64_t query, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      m.maximum[r] = -kInfinity;
      m.sum[r] = m.delta[r] = 0.0f;
    }
    for_each_block(query, rows, [&](const Block& block) {
      products(block);
      const int64_t columns = whole_panels(block.keys);
      for (int64_t r = 0; r < rows; ++r) {
        const float *s = scores(block) + r * m.stride, *dp = dweights(block) + r * m.stride;
        const float before = m.maximum[r];
        const float after = m.maxima[r] > before ? m.maxima[r] : before;
        const float reference = after == -kInfinity ? 0.0f : after;
        const float factor = exp_minus(reference - before);
        Vec sum[2] = {}, delta[2] = {};
        for (int64_t n = 0; n < columns; n += kPanel) {
          for (int i = 0; i < 2; ++i) {
            const Vec e = exp_minus(reference - load(s + n + i * kLanes));
            sum[i] += e;
            delta[i] = fma(e, load(dp + n + i * kLanes), delta[i]);
          }
        }
        m.sum[r] = m.sum[r] * factor + total(sum[0] + sum[1]);
        m.delta[r] = m.delta[r] * factor + total(delta[0] + delta[1]);
        m.maximum[r] = after;
      }
    });
    // All logits of a row that attends to no key are -inf. With a sum of 1 and a maximum of 0, the
    // weights of such a row are 0 instead of NaN.
    for (int64_t r = 0; r < rows; ++r) {
      const bool empty = m.sum[r] == 0.0f;
      if (empty) m.sum[r] = 1.0f;
      m.delta[r] /= m.sum[r];
      if (empty) m.maximum[r] = 0.0f;
    }
  }

  void move_statistics(int64_t query, int64_t rows, bool save) {
    float* places[] = {p.maximum, p.sum, p.delta};
    float* here[] = {m.maximum, m.sum, m.delta};
    for (int i = 0; i < 3; ++i) {
      float* place = statistic(a, h, places[i]) + query;
      __builtin_memcpy(save ? place : here[i], save ? here[i] : place, rows * sizeof(float));
    }
  }

  // Overwrites the logits of a block with the weights after dropout, and dP with dS = P (dP -
  // delta).
  void finish(const Block& block) const {
    const int64_t columns = whole_panels(block.keys);
    for (int64_t r = 0; r < block.rows; ++r) {
      float *s = scores(block) + r * m.stride, *dp = dweights(block) + r * m.stride;
      const Vec maximum = splat(m.maximum[r]), sum = splat(m.sum[r]);
      const Vec delta = splat(m.delta[r]);
      for (int64_t n = 0; n < columns; n += kLanes) {
        const Vec weight = exp_minus(maximum - load(s + n)) / sum;
        store(s + n, weight);
        store(dp + n, weight * (load(dp + n) - delta));
      }
      if (!a.dropout.enabled) continue;
      attention_dropout(a.dropout, h, block.query + r, block.key, block.keys, m.kept);
      drop_row(s, columns, m.kept, a.dropout.scale);
    }
  }

  // add_dq adds the contribution of a block to dq of the block's queries. add_dk_dv adds the
  // contributions of a block to dk and dv of the block's keys.
  void add_dq(const Block& block) const {
    product<Update::add>({dweights(block), m.stride, 1}, block.rows,
                         m.keys + (block.key - keys.low) * kPanel, all() * kPanel, width / kPanel,
                         block.keys, m.dq, width);
  }

  void add_dk_dv(const Block& block) const {
    const int64_t at = (block.key - keys.low) * width;
    product<Update::add>({scores(block), 1, m.stride}, block.keys, m.dout_columns,
                         kQueries * kPanel, width / kPanel, block.rows, m.dv + at, width);
    product<Update::add>({dweights(block), 1, m.stride}, block.keys, m.q_columns, kQueries * kPanel,
                         width / kPanel, block.rows, m.dk + at, width);
  }

  // Adds the gradients of the relative terms of a block; `wants_segments` tells whether the
  // gradient of the segment scores is wanted.
  void add_relative(const Block& block, bool wants_segments) const {
    const int64_t key = block.key - keys.low;
    add_relative_gradients(
        a, h,
        {block, dweights(block), m.stride, m.q_columns, m.dq, m.keys + key * kPanel, all(),
         m.dk + key * width, wants_segments ? m.dsegment_scores : nullptr});
  }

  void clear(float* x, int64_t rows) const {
    for (int64_t n = 0; n < rows * width; ++n) x[n] = 0.0f;
  }

  void write(const float* x, int64_t rows, float scale, const Rows& to, int64_t first) const {
    auto* place = first_row<F>(a, h, to, first);
    for (int64_t r = 0; r < rows; ++r) {
      for_each_vector(a.head_dim, [&](int64_t n, int count) {
        F::store(place + r * to.row + n, load(x + r * width + n) * scale, count);
      });
    }
  }

  // Computes gradients for the queries [range.low, range.high) and the keys of the item: dq if
  // `for_queries`, and dk and dv if `for_keys`. If `finds`, the function computes the statistics of
  // the rows; otherwise, it reads the statistics that earlier items stored. For an item that is a
  // whole head, `relative` receives the gradients of the relative terms.
  void run(Range range, bool finds, bool for_queries, bool for_keys,
           const RelativeGradients* relative = nullptr) {
    float* of_segments = relative == nullptr ? nullptr : relative->dsegment_scores;
    if (relative != nullptr) clear_gradients(a, *h.relative);
    if (for_keys) clear(m.dk, keys.high - keys.low), clear(m.dv, keys.high - keys.low);
    for (int64_t query = range.low; query < range.high; query += kQueries) {
      const int64_t rows = clamp(range.high - query, 0, kQueries);
      load_queries(query, rows);
      if (finds) find_statistics(query, rows);
      if (p.maximum != nullptr) move_statistics(query, rows, finds);
      clear(m.dq, rows);
      for (int64_t r = 0; r < rows; ++r) m.dsegment_scores[r] = 0.0f;
      for_each_block(query, rows, [&](const Block& block) {
        if (!finds || m.kept_keys == 0) products(block);
        finish(block);
        if (for_queries) add_dq(block);
        if (for_keys) add_dk_dv(block);
        if (relative != nullptr) add_relative(block, of_segments != nullptr);
      });
      if (for_queries) write(m.dq, rows, a.scale, p.dq, h.q_start + query);
      if (of_segments == nullptr) continue;
      float* place = statistic(a, h, of_segments) + query;
      for (int64_t r = 0; r < rows; ++r) place[r] = m.dsegment_scores[r] * a.scale;
    }
    if (for_keys) {
      write(m.dk, keys.high - keys.low, a.scale, p.dk, h.k_start + keys.low);
      write(m.dv, keys.high - keys.low, 1.0f, p.dv, h.k_start + keys.low);
    }
    if (relative != nullptr) fold_gradients(a, h.head, *h.relative, *relative);
  }
};

template <class F>
void backward_item(const AttentionBackward& p, AttentionPass pass, const AttentionItem& item,
                   void* scratch) {
  Arena arena = {(char*)scratch};
  const Head h = head_of(p.forward, item.sequence, item.head);
  const bool by_keys = pass == AttentionPass::keys;
  const Range keys = by_keys ? Range{item.begin, item.end} : Range{0, h.k_length};
  const Range queries =
      pass == AttentionPass::queries ? Range{item.begin, item.end} : Range{0, h.q_length};
  Backward<F> work(p, item.sequence, item.head, arena, keys);
  work.run(queries, !by_keys, !by_keys, pass != AttentionPass::queries);
}

void attention_backward(const AttentionBackward& p, AttentionPass pass, const AttentionItem& item,
                        void* scratch) {
  if (p.forward.format == Format::f32) return backward_item<F32>(p, pass, item, scratch);
  if (p.forward.format == Format::bf16) return backward_item<BF16>(p, pass, item, scratch);
  backward_item<F16>(p, pass, item, scratch);
}

template <class F>
void relative_backward_item(const AttentionBackward& p, const RelativeGradients& to,
                            const AttentionItem& item, void* scratch) {
  for (int64_t sequence = item.begin; sequence < item.end; ++sequence) {
    Arena arena = {(char*)scratch};
    const Head h = head_of(p.forward, sequence, item.head);
    Backward<F> work(p, sequence, item.head, arena, {0, h.k_length});
    work.run({0, h.q_length}, true, true, true, &to);
  }
}

void relative_backward(const AttentionBackward& p, const RelativeGradients& to,
                       const AttentionItem& item, void* scratch) {
  if (p.forward.format == Format::f32) return relative_backward_item<F32>(p, to, item, scratch);
  if (p.forward.format == Format::bf16) return relative_backward_item<BF16>(p, to, item, scratch);
  relative_backward_item<F16>(p, to, item, scratch);
}

// Computes one block of the bias gradient. Where the bias is broadcast over a dimension, its
// gradient is the sum over this dimension. Terms are added in double precision, because a sum may
// have terms from many sequences.
template <class F>
void bias_item(const AttentionBackward& p, const AttentionItem& item, void* scratch) {
  const Attention& a = p.forward;
  Arena arena = {(char*)scratch};
  double* sums = arena.take<double>(kQueries * kKeys);
  const bool all_queries = p.dbias_row == 0, all_keys = p.dbias_key == 0;
  const int64_t last_sequence = p.dbias_batch == 0 ? a.batch : item.sequence + 1;
  const int64_t last_head = p.dbias_head == 0 ? a.heads : item.head + 1;
  const int64_t rows = all_queries ? 1 : clamp(a.max_q - item.begin, 0, kQueries);
  const int64_t columns = all_keys ? 1 : clamp(a.max_k - item.end, 0, kKeys);
  for (int64_t i = 0; i < rows * columns; ++i) sums[i] = 0.0;
  for (int64_t sequence = item.sequence; sequence < last_sequence; ++sequence) {
    for (int64_t head = item.head; head < last_head; ++head) {
      const Head h = head_of(a, sequence, head);
      const Range keys =
          all_keys ? Range{0, h.k_length}
                   : Range{clamp(item.end, 0, h.k_length), clamp(item.end + kKeys, 0, h.k_length)};
      const Range queries = all_queries ? Range{0, h.q_length}
                                        : Range{clamp(item.begin, 0, h.q_length),
                                                clamp(item.begin + kQueries, 0, h.q_length)};
      if (keys.low == keys.high || queries.low == queries.high) continue;
      Arena rest = arena;
      Backward<F> work(p, sequence, head, rest, keys);
      for (int64_t query = queries.low; query < queries.high; query += kQueries) {
        const int64_t count = clamp(queries.high - query, 0, kQueries);
        work.load_queries(query, count);
        work.move_statistics(query, count, false);
        work.for_each_block(query, count, [&](const Block& block) {
          work.products(block);
          work.finish(block);
          const float* ds = work.dweights(block);
          for (int64_t r = 0; r < block.rows; ++r) {
            double* row = sums + (all_queries ? 0 : r) * columns;
            for (int64_t n = 0; n < block.keys; ++n) {
              row[all_keys ? 0 : n] += ds[r * work.m.stride + n];
            }
          }
        });
      }
    }
  }
  float* place = p.dbias + item.sequence * p.dbias_batch + item.head * p.dbias_head +
                 item.begin * p.dbias_row + (all_keys ? 0 : item.end);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < columns; ++n) place[r * p.dbias_row + n] = (float)sums[r * columns + n];
  }
}

int64_t attention_bias_scratch(const AttentionBackward& p) {
  const Attention& a = p.forward;
  return kQueries * kKeys * (int64_t)sizeof(double) +
         attention_backward_scratch(p, p.dbias_key == 0 ? a.max_k : kKeys);
}

void attention_bias_gradient(const AttentionBackward& p, const AttentionItem& item, void* scratch) {
  if (p.forward.format == Format::f32) return bias_item<F32>(p, item, scratch);
  if (p.forward.format == Format::bf16) return bias_item<BF16>(p, item, scratch);
  bias_item<F16>(p, item, scratch);
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
