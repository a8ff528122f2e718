// The terms of relative positions (relative.h) in attention with bf16 products. The products of
// strip_kernel.h replace those of fp32.
//
// The terms of keys are computed for all queries of an item when a block of keys begins, because a
// strip of queries alone would need windows of twice its size.

#pragma once

#include "relative.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

struct StripTables {
  RelativeTables tables;
  uint16_t* rows;  // gathered rows of a table, and then the rows of a block of keys
  float* of_keys;  // the terms of a block of keys, one row for each key
  int64_t of_keys_stride;

  StripTables() = default;

  StripTables(const Attention& a, int64_t first, int64_t count, int64_t key_count, Arena& arena)
      : tables(a, first, count, key_count, false, arena) {
    const int64_t width = whole_panels(a.head_dim);
    rows = arena.take<uint16_t>((tables.columns > kKeys ? tables.columns : kKeys) * width);
    of_keys_stride = tables.rows + kPanel + 16;
    of_keys = arena.take<float>(a.relative->queries.data == nullptr ? 0 : kKeys * of_keys_stride);
  }
};

inline int64_t strip_relative_scratch(const Attention& a, int64_t rows) {
  if (a.relative == nullptr) return 0;
  Arena arena = {nullptr};
  StripTables(a, 0, rows, a.max_k, arena);
  return (int64_t)(arena.next - (char*)nullptr);
}

// Gathers the tables and packs them as right operands of bf16 products. The packed tables take the
// memory of the tables of relative.h.
inline void gather_strip_tables(const Attention& a, const Head& h, StripTables& s) {
  find_rows(a, h, s.tables);
  const int64_t panel = steps_of(a.head_dim) * kPanelStep;
  const auto pack = [&](const ConstRows& table, const int32_t* rows, float* packed) {
    if (table.data == nullptr) return;
    const auto* data = (const uint16_t*)table.data + h.head * table.head;
    for (int64_t c = 0; c < s.tables.columns; ++c) {
      uint16_t* to = s.rows + c * a.head_dim;
      if (rows[c] < 0) {
        __builtin_memset(to, 0, 2 * a.head_dim);
      } else {
        __builtin_memcpy(to, data + rows[c] * table.row, 2 * a.head_dim);
      }
    }
    for (int64_t c = 0; c < s.tables.columns; c += kPanel) {
      pack_steps<BF16>(s.rows + c * a.head_dim, a.head_dim, 1, kPanel, a.head_dim,
                       (char*)packed + c / kPanel * panel);
    }
  };
  pack(a.relative->keys, s.tables.of_queries, s.tables.positions_of_queries);
  pack(a.relative->queries, s.tables.of_keys, s.tables.positions_of_keys);
}

// Computes the terms of a block of keys for all queries of the item. Row n of the keys is at `k` +
// n * stride.
inline void find_terms_of_keys(const Attention& a, const StripTables& s, const uint16_t* k,
                               int64_t stride, int64_t key, int64_t keys) {
  if (s.tables.positions_of_keys == nullptr) return;
  const int64_t width = whole_panels(a.head_dim), steps = steps_of(a.head_dim);
  for (int64_t n = 0; n < whole_strips(keys); ++n) {
    for (int64_t d = 0; d < width; d += kStep) {
      const int depth = n < keys ? clamp_count(a.head_dim - d, kStep) : 0;
      store((float*)(s.rows + n * width + d), load_line<BF16>(k + n * stride + d, depth));
    }
  }
  for (int64_t n = 0; n < keys; n += kStrip) {
    const int64_t window = s.tables.window_of_keys(s.tables.begin, key + n);
    const char* table = (const char*)s.tables.positions_of_keys;
    StripProduct product = {s.rows + n * width,
                            width,
                            table + window / kPanel * steps * kPanelStep,
                            steps,
                            s.of_keys + n * s.of_keys_stride,
                            s.of_keys_stride,
                            false,
                            s.tables.rows / kPanel + 1};
    product.finish();
  }
}

// Adds the terms to the scores of a strip of queries. `first` is the number of the strip's first
// row in the item, and `q` points to this row.
inline void add_strip_terms(const Attention& a, const Head& h, const StripTables& s,
                            const Block& block, int64_t first, const uint16_t* q, float* scores) {
  const int64_t width = whole_panels(a.head_dim), steps = steps_of(a.head_dim);
  const bool with_keys = s.tables.positions_of_queries != nullptr;
  if (with_keys) {
    const int64_t window = s.tables.window_of_queries(block.query, block.key);
    const char* table = (const char*)s.tables.positions_of_queries;
    StripProduct product = {q,
                            width,
                            table + window / kPanel * steps * kPanelStep,
                            steps,
                            s.tables.product,
                            RelativeTables::kProductStride,
                            false,
                            whole_panels(block.keys) / kPanel + 1};
    product.finish();
  }
  if (with_keys || s.tables.bias != nullptr) {
    add_terms_of_queries(s.tables, block.query, block.rows, block,
                         with_keys ? s.tables.product : nullptr, scores, kScoreStride);
  }
  for (int64_t n = 0; n < block.keys && s.tables.positions_of_keys != nullptr; n += kPanel) {
    add_terms_of_keys(s.of_keys + n * s.of_keys_stride + first, s.of_keys_stride, block.rows,
                      scores + n, kScoreStride);
  }
  if (a.relative->segment_scores != nullptr) {
    add_segment_scores(segments_of(a, h), block, scores, kScoreStride);
  }
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
