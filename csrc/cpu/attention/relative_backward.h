// The gradients of the terms of relative positions (relative.h), from the gradients dS of a block
// of logits. With A = q keysᵀ for a strip of queries and a window of the gathered table, the
// gradient dA has the elements of dS, shifted by one element from row to row as the terms are, and
// zeros elsewhere. The gradients of the strip and of the window are then products:
//
//     dq += dA keys,   dkeys += dAᵀ q.
//
// The same holds for the other table, with queries and keys exchanged.

#pragma once

#include "relative.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// The operands of the gradients of one block.
struct RelativeBlock {
  const Block& block;
  const float* ds;
  int64_t stride;          // elements between rows of ds
  const float* q_columns;  // the block's queries, packed as a right operand
  float* dq;
  const float* k_columns;  // the block's keys, packed as a right operand with panels of
  int64_t k_depth;         // `k_depth` rows
  float* dk;
  float* dsegment_scores;  // of the block's queries; null if not wanted
};

// Writes dA for a strip of `count` queries to `to`, whose rows are `width` elements wide.
inline void shift_queries(const float* ds, int64_t stride, int64_t count, int64_t keys,
                          int64_t width, float* to) {
  for (int64_t r = 0; r < count; ++r, ds += stride, to += RelativeTables::kProductStride) {
    for (int64_t n = 0; n < width; n += kLanes) store(to + n, Vec{});
    float* shifted = to - r + kPanel;
    for_each_vector(keys,
                    [&](int64_t n, int lanes) { store(shifted + n, load(ds + n, lanes), lanes); });
  }
}

// Writes the gradient of the terms of a panel of keys and `count` queries to `to`, one row for each
// key. Rows are `width` elements wide.
inline void shift_keys(const float* ds, int64_t stride, int64_t count, int64_t width, float* to) {
  constexpr int64_t kStride = RelativeTables::kProductStride;
  for (int64_t j = 0; j < kPanel; ++j) {
    for (int64_t n = 0; n < width; n += kLanes) store(to + j * kStride + n, Vec{});
  }
  for (int64_t r = 0; r < count; r += kLanes) {
    const int rows = (int)(count - r < kLanes ? count - r : kLanes);
    for (int64_t n = 0; n < kPanel; n += kLanes) {
      Vec square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        square[i] = i < rows ? load(ds + (r + i) * stride + n) : Vec{};
      }
      transpose(square);
      for (int i = 0; i < kLanes; ++i) {
        store(to + (n + i) * kStride + r - (n + i) + kPanel, square[i], rows);
      }
    }
  }
}

inline void add_relative_gradients(const Attention& a, const Head& h, const RelativeBlock& b) {
  const RelativeTables& tables = *h.relative;
  constexpr int64_t kStride = RelativeTables::kProductStride;
  const Block& block = b.block;
  const int64_t width = whole_panels(a.head_dim), panels = width / kPanel;
  const int64_t rows = whole_panels(block.rows), columns = whole_panels(block.keys);
  const bool biased = tables.bias != nullptr, with_keys = tables.positions_of_queries != nullptr;
  float* shifted = tables.product;
  for (int64_t first = 0; first < block.rows && (biased || with_keys); first += kPanel) {
    const int64_t query = block.query + first, count = clamp(block.rows - first, 0, kPanel);
    const int64_t window = tables.window_of_queries(query, block.key), all = columns + kPanel;
    shift_queries(b.ds + first * b.stride, b.stride, count, columns, all, shifted);
    if (with_keys) {
      product<Update::add>({shifted, kStride, 1}, count, tables.rows_of_queries + window * kPanel,
                           tables.columns * kPanel, panels, all, b.dq + first * width, width);
      product<Update::add>({shifted, 1, kStride}, all, b.q_columns + first * kPanel,
                           kQueries * kPanel, panels, count,
                           tables.gradient_of_queries + window * width, width);
    }
    for (int64_t r = 0; r < count && biased; ++r) {
      float* sums = tables.gradient_of_bias + window;
      for (int64_t n = 0; n < all; n += kLanes) {
        store(sums + n, load(sums + n) + load(shifted + r * kStride + n));
      }
    }
  }
  for (int64_t n = 0; n < block.keys && tables.positions_of_keys != nullptr; n += kPanel) {
    const int64_t window = tables.window_of_keys(block.query, block.key + n);
    const int64_t all = rows + kPanel, count = clamp(block.keys - n, 0, kPanel);
    shift_keys(b.ds + n, b.stride, block.rows, all, shifted);
    product<Update::add>({shifted, kStride, 1}, count, tables.rows_of_keys + window * kPanel,
                         tables.columns * kPanel, panels, all, b.dk + n * width, width);
    product<Update::add>({shifted, 1, kStride}, all, b.k_columns + n * kPanel, b.k_depth * kPanel,
                         panels, count, tables.gradient_of_keys + window * width, width);
  }
  if (b.dsegment_scores == nullptr) return;
  const Segments segments = segments_of(a, h);
  for (int64_t r = 0; r < block.rows; ++r) {
    const int32_t own = segments.queries[block.query + r];
    const float* row = b.ds + r * b.stride;
    float sum = 0.0f;
    for (int64_t n = 0; n < block.keys; ++n) {
      sum += segments.keys[block.key + n] != own ? row[n] : 0.0f;
    }
    b.dsegment_scores[r] += sum;
  }
}

// Sets the gradients of a head's gathered tables to 0.
inline void clear_gradients(const Attention& a, const RelativeTables& tables) {
  const auto clear = [&](float* gradient, int64_t elements) {
    for (int64_t n = 0; n < tables.columns * elements && gradient != nullptr; ++n) {
      gradient[n] = 0.0f;
    }
  };
  const int64_t width = whole_panels(a.head_dim);
  clear(tables.gradient_of_queries, width);
  clear(tables.gradient_of_keys, width);
  clear(tables.gradient_of_bias, 1);
}

// Adds the gradients of a head's gathered tables, times the scale, to the gradients of the tables.
inline void fold_gradients(const Attention& a, int64_t head, const RelativeTables& tables,
                           const RelativeGradients& to) {
  const RelativeTerms& terms = *a.relative;
  const int64_t width = whole_panels(a.head_dim);
  const auto fold = [&](const int32_t* rows, const float* gradient, float* table) {
    if (table == nullptr) return;
    for (int64_t c = 0; c < tables.columns; ++c) {
      if (rows[c] < 0) continue;
      float* sums = table + (head * terms.positions + rows[c]) * a.head_dim;
      for_each_vector(a.head_dim, [&](int64_t n, int count) {
        const Vec x = load(gradient + c * width + n) * a.scale;
        store(sums + n, load(sums + n, count) + x, count);
      });
    }
  };
  fold(tables.of_queries, tables.gradient_of_queries, to.dkeys);
  fold(tables.of_keys, tables.gradient_of_keys, to.dqueries);
  if (to.dbias == nullptr) return;
  for (int64_t c = 0; c < tables.columns; ++c) {
    const int32_t row = tables.of_queries[c];
    if (row >= 0) to.dbias[head * terms.positions + row] += tables.gradient_of_bias[c] * a.scale;
  }
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
