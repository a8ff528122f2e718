// The terms of relative positions in the logits of attention (RelativeTerms in isa/kernels.h), and
// their gradients.
//
// The term q_i · keys[t] depends on the query i and the distance d of query and key, where t is the
// row of d. The rows of the table are first gathered in the order of distances, so that row c of
// the gathered table belongs to one distance. For a strip of queries and a block of keys, one
// product of the strip and a window of the gathered table then gives the terms of all distances
// that occur. Key n has a distance that is larger by one than the distance of key n + 1, so the
// terms of a query for consecutive keys are consecutive elements of the query's row of the product.
// From one query to the next, they are shifted by one element:
//
//     term of row r and key n = product[r][n - r + kPanel].
//
// The term k_j · queries[t] is the same with queries and keys exchanged: a strip of keys is
// multiplied by a window of the other gathered table, and square blocks are transposed while the
// terms are added. No product has more rows than a strip, so that memory grows with the number of
// distances, and not with queries times keys.

#pragma once

#include "../isa/transpose.h"
#include "scores.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// The rows of a table in the order of the columns of a gathered table. Rows of columns without a
// row in the table are zeros.
template <class F>
struct GatheredRows {
  const typename F::Storage* data;
  int64_t stride;
  const int32_t* rows;  // -1 for a column without a row

  FASTBERT_INLINE Vec load(int64_t column, int64_t element, int count) const {
    if (rows[column] < 0) return Vec{};
    return F::load(data + rows[column] * stride + element, count);
  }
};

// The gathered tables of a head for the queries [begin, begin + rows) of a sequence and all keys.
// Column c of the tables of the term of queries and positions belongs to the distance
// `first_distance` - c. Column c of the tables of the other term belongs to the distance
// `last_distance` + c. The member functions return the first column of a window.
struct RelativeTables {
  int64_t begin, rows, keys, columns;  // rows and keys are padded to whole panels
  int64_t first_distance, last_distance;
  int32_t *of_queries, *of_keys;                    // the row of each column in the user's tables
  float *positions_of_queries, *positions_of_keys;  // packed as right operands of the terms
  float *rows_of_queries, *rows_of_keys;            // packed as right operands of gradients
  float *gradient_of_queries, *gradient_of_keys, *gradient_of_bias;
  float* bias;     // one element for each column of the term of queries
  float* product;  // a strip and a window

  RelativeTables() = default;

  RelativeTables(const Attention& a, int64_t first, int64_t count, int64_t key_count, bool backward,
                 Arena& arena) {
    const RelativeTerms& terms = *a.relative;
    begin = first;
    rows = whole_panels(count);
    keys = whole_panels(key_count);
    columns = rows + keys;
    of_queries = arena.take<int32_t>(columns);
    of_keys = arena.take<int32_t>(columns);
    const int64_t width = whole_panels(a.head_dim);
    const auto table = [&](const void* data, int64_t elements) {
      return data == nullptr ? nullptr : arena.take<float>(columns * elements);
    };
    positions_of_queries = table(terms.keys.data, width);
    positions_of_keys = table(terms.queries.data, width);
    rows_of_queries = backward ? table(terms.keys.data, width) : nullptr;
    rows_of_keys = backward ? table(terms.queries.data, width) : nullptr;
    gradient_of_queries = backward ? table(terms.keys.data, width) : nullptr;
    gradient_of_keys = backward ? table(terms.queries.data, width) : nullptr;
    gradient_of_bias = backward ? table(terms.bias, 1) : nullptr;
    bias = table(terms.bias, 1);
    product = arena.take<float>(kPanel * kProductStride);
  }

  // The number of elements between rows of `product`. It is not a power of two, as kScoreStride.
  static constexpr int64_t kProductStride = kKeys + 2 * kPanel + 16;

  FASTBERT_INLINE int64_t window_of_queries(int64_t query, int64_t key) const {
    return key + rows - (query - begin) - kPanel;
  }
  FASTBERT_INLINE int64_t window_of_keys(int64_t query, int64_t key) const {
    return keys - key + (query - begin) - kPanel;
  }
};

inline int64_t relative_scratch(const Attention& a, int64_t rows, bool backward) {
  if (a.relative == nullptr) return 0;
  Arena arena = {nullptr};
  RelativeTables(a, 0, rows, a.max_k, backward, arena);
  return (int64_t)(arena.next - (char*)nullptr);
}

// Finds the row of each column, and gathers the bias.
inline void find_rows(const Attention& a, const Head& h, RelativeTables& tables) {
  const RelativeTerms& terms = *a.relative;
  const int64_t offset = h.k_length - h.q_length;
  tables.first_distance = tables.begin + offset + tables.rows;
  tables.last_distance = tables.begin + offset - tables.keys;
  const auto row_of = [&](int64_t distance) {
    const int64_t place = distance + terms.most - 1;
    return place < 0 || place > 2 * (terms.most - 1) ? -1 : terms.index[place];
  };
  for (int64_t c = 0; c < tables.columns; ++c) {
    tables.of_queries[c] = row_of(tables.first_distance - c);
    tables.of_keys[c] = row_of(tables.last_distance + c);
  }
  if (terms.bias == nullptr) return;
  const float* bias = terms.bias + h.head * terms.positions;
  for (int64_t c = 0; c < tables.columns; ++c) {
    tables.bias[c] = tables.of_queries[c] < 0 ? 0.0f : bias[tables.of_queries[c]];
  }
}

// Gathers and packs the tables of a head.
template <class F>
void gather_tables(const Attention& a, const Head& h, RelativeTables& tables) {
  const RelativeTerms& terms = *a.relative;
  find_rows(a, h, tables);
  const auto pack = [&](const ConstRows& table, const int32_t* rows, float* positions,
                        float* by_rows) {
    if (table.data == nullptr) return;
    const GatheredRows<F> gathered = {(const typename F::Storage*)table.data + h.head * table.head,
                                      table.row, rows};
    pack_rows<F>(gathered, tables.columns, a.head_dim, positions);
    if (by_rows == nullptr) return;
    pack_columns<F>(gathered, tables.columns, a.head_dim, tables.columns, by_rows);
  };
  pack(terms.keys, tables.of_queries, tables.positions_of_queries, tables.rows_of_queries);
  pack(terms.queries, tables.of_keys, tables.positions_of_keys, tables.rows_of_keys);
}

// The gathered tables of a head, or none if attention has no relative terms. `scratch` has the
// bytes of relative_scratch.
template <class F>
class OptionalTables {
 public:
  OptionalTables(const Attention& a, const Head& h, int64_t begin, int64_t rows, char* scratch,
                 bool backward = false) {
    if (a.relative == nullptr) return;
    Arena arena = {scratch};
    tables_ = RelativeTables(a, begin, rows, h.k_length, backward, arena);
    gather_tables<F>(a, h, tables_);
    any_ = true;
  }

  const RelativeTables* get() const { return any_ ? &tables_ : nullptr; }

 private:
  RelativeTables tables_;
  bool any_ = false;
};

// The segments of the queries and keys of a sequence, and the scores of a head's queries.
struct Segments {
  const int32_t *queries, *keys;
  const float* scores;
};

FASTBERT_INLINE Segments segments_of(const Attention& a, const Head& h) {
  const RelativeTerms& terms = *a.relative;
  const bool packed = a.cu_q != nullptr;
  return {terms.q_segments + (packed ? h.q_start : h.sequence * a.max_q),
          terms.k_segments + (packed ? h.k_start : h.sequence * a.max_k),
          statistic(a, h, terms.segment_scores)};
}

// Adds the terms of a strip of queries and all keys of a block to rows of scores. The strip begins
// at query number `query`, and row r of `terms` has the terms of its row r.
inline void add_terms_of_queries(const RelativeTables& tables, int64_t query, int64_t count,
                                 const Block& block, const float* terms, float* scores,
                                 int64_t stride) {
  const int64_t width = whole_panels(block.keys);
  const int64_t window = tables.window_of_queries(query, block.key);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t shift = kPanel - r;
    float* row = scores + r * stride;
    const float* from = terms == nullptr ? nullptr : terms + r * RelativeTables::kProductStride;
    const float* bias = tables.bias == nullptr ? nullptr : tables.bias + window;
    for (int64_t n = 0; n < width; n += kLanes) {
      Vec x = load(row + n);
      if (from != nullptr) x += load(from + n + shift);
      if (bias != nullptr) x += load(bias + n + shift);
      store(row + n, x);
    }
  }
}

// Adds the terms of a panel of keys and `count` queries to scores. Row j of `terms` has the terms
// of key j of the panel, and its rows are terms_stride elements apart.
inline void add_terms_of_keys(const float* terms, int64_t terms_stride, int64_t count,
                              float* scores, int64_t stride) {
  for (int64_t r = 0; r < count; r += kLanes) {
    const int rows = (int)(count - r < kLanes ? count - r : kLanes);
    for (int64_t n = 0; n < kPanel; n += kLanes) {
      Vec square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        square[i] = load(terms + (n + i) * terms_stride + r - (n + i) + kPanel);
      }
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (i >= rows) break;
        float* place = scores + (r + i) * stride + n;
        store(place, load(place) + square[i]);
      }
    }
  }
}

inline void add_segment_scores(const Segments& segments, const Block& block, float* scores,
                               int64_t stride) {
  for (int64_t r = 0; r < block.rows; ++r) {
    const int32_t own = segments.queries[block.query + r];
    const float score = segments.scores[block.query + r];
    float* row = scores + r * stride;
    for (int64_t n = 0; n < block.keys; ++n) {
      row[n] += segments.keys[block.key + n] != own ? score : 0.0f;
    }
  }
}

// Adds the terms to the product q kᵀ of a block. `q` has the rows of the block, and `keys` are
// packed in panels.
inline void add_relative_terms(const Attention& a, const Head& h, const Block& block,
                               const float* q, const float* keys, float* scores, int64_t stride) {
  const RelativeTables& tables = *h.relative;
  constexpr int64_t kStride = RelativeTables::kProductStride;
  const int64_t width = whole_panels(a.head_dim), panel = a.head_dim * kPanel;
  const int64_t rows = whole_panels(block.rows), columns = whole_panels(block.keys);
  const bool biased = tables.bias != nullptr, with_keys = tables.positions_of_queries != nullptr;
  for (int64_t first = 0; first < block.rows && (biased || with_keys); first += kPanel) {
    const int64_t query = block.query + first, count = clamp(block.rows - first, 0, kPanel);
    if (with_keys) {
      const int64_t window = tables.window_of_queries(query, block.key);
      product<Update::store>({q + first * width, width, 1}, count,
                             tables.positions_of_queries + window * a.head_dim, panel,
                             (columns + kPanel) / kPanel, a.head_dim, tables.product, kStride);
    }
    add_terms_of_queries(tables, query, count, block, with_keys ? tables.product : nullptr,
                         scores + first * stride, stride);
  }
  for (int64_t n = 0; n < block.keys && tables.positions_of_keys != nullptr; n += kPanel) {
    const int64_t window = tables.window_of_keys(block.query, block.key + n);
    product<Update::store>({keys + n * a.head_dim, 1, kPanel}, kPanel,
                           tables.positions_of_keys + window * a.head_dim, panel,
                           (rows + kPanel) / kPanel, a.head_dim, tables.product, kStride);
    add_terms_of_keys(tables.product, kStride, block.rows, scores + n, stride);
  }
  if (a.relative->segment_scores != nullptr) {
    add_segment_scores(segments_of(a, h), block, scores, stride);
  }
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
