// The embedding of a token, y = dropout(LN(word + type + position)) (Devlin et al. 2019, figure 2),
// and the sums of segments of rows from which the gradients of the tables are computed.

#pragma once

#include "layer_norm_kernel.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// The sum of a token's table rows, one from each table. The call operator returns `count` elements
// of the sum, from element n on.
template <class Format, int kTables>
struct TableSum {
  using Storage = typename Format::Storage;

  const Storage* rows[kTables];

  FASTBERT_INLINE TableSum(const Lookup& lookup, int64_t token) {
    for (int i = 0; i < kTables; ++i) {
      const ConstMatrix& table = lookup.tables[i];
      rows[i] = (const Storage*)table.data + lookup.indices[i][token] * table.stride;
    }
  }

  FASTBERT_INLINE Vec operator()(int64_t n, int count) const {
    Vec v = Format::load(rows[0] + n, count);
    for (int i = 1; i < kTables; ++i) v += Format::load(rows[i] + n, count);
    return v;
  }
};

template <class Format, int kTables>
void embedding_forward_rows(const EmbeddingForward& params, int64_t begin, int64_t end,
                            float* scratch) {
  const EmbeddingForward p = params;  // RowSum (layer_norm_kernel.h) explains this copy.
  using Storage = typename Format::Storage;
  uint32_t* mask = scratch_mask(scratch, p.columns);
  for (int64_t row = begin; row < end; ++row) {
    const TableSum<Format, kTables> sum(p.lookup, row);
    Vec totals[kSums] = {};
    for_each_summand(p.columns, [&](int64_t n, int u, int count) __attribute__((always_inline)) {
      const Vec v = sum(n, count);
      store(scratch + n, v, count);
      totals[u] += v;
    });
    const Moments m = moments(scratch, totals, p.columns, p.eps);
    if (p.dropout.enabled) dropout_mask(p.dropout, row, p.columns, mask);
    Storage* y = (Storage*)p.y + row * p.columns;
    write_normalised(p, scratch, m,
                     [&](int64_t n, int count, Vec v) __attribute__((always_inline)) {
                       if (p.dropout.enabled) v = drop(v, mask + n, p.dropout.scale, count);
                       Format::store(y + n, v, count);
                     });
    keep_moments(p, row, m);
  }
}

// The operands and the result of one row of the backward pass.
template <class Format, int kTables>
struct EmbeddingRow {
  using P = EmbeddingBackward;
  using Storage = typename Format::Storage;
  static constexpr bool kHasXBias = false;

  const Storage* dy;
  float* dsum;
  const uint32_t* mask;
  float scale;

  static FASTBERT_INLINE TableSum<Format, kTables> sum(const P& p, int64_t row, uint32_t*) {
    return TableSum<Format, kTables>(p.lookup, row);
  }

  FASTBERT_INLINE void begin(const P& p, int64_t row, uint32_t* mask_memory) {
    dy = row_of<Storage>(p.dy, row);
    dsum = p.dsum + row * p.columns;
    mask = p.dropout.enabled ? mask_memory : nullptr;
    scale = p.dropout.scale;
    if (mask) dropout_mask(p.dropout, row, p.columns, mask_memory);
  }

  FASTBERT_INLINE Vec gradient(int64_t n, int count) const {
    const Vec v = Format::load(dy + n, count);
    return mask ? drop(v, mask + n, scale, count) : v;
  }

  FASTBERT_INLINE Vec finish(int64_t n, Vec d, int count) const {
    store(dsum + n, d, count);
    return d;
  }
};

template <int kTables>
struct TableCount {
  static constexpr int value = kTables;
};

// Calls body(format, tables) with objects whose types stand for the format and the number of
// tables.
template <class P, class Body>
FASTBERT_INLINE void with_tables(const P& p, Body body) {
  with_format(p.format, [&](auto format) __attribute__((always_inline)) {
    if (p.lookup.count == 1) return body(format, TableCount<1>{});
    if (p.lookup.count == 2) return body(format, TableCount<2>{});
    return body(format, TableCount<3>{});
  });
}

void embedding_forward(const EmbeddingForward& p, int64_t begin, int64_t end, float* scratch) {
  with_tables(p, [&](auto format, auto tables) {
    embedding_forward_rows<decltype(format), tables.value>(p, begin, end, scratch);
  });
}

void embedding_backward(const EmbeddingBackward& p, int64_t begin, int64_t end, float* scratch,
                        double* partial) {
  with_tables(p, [&](auto format, auto tables) {
    using Row = EmbeddingRow<decltype(format), tables.value>;
    layer_norm_backward_rows<Row>(p, (1 + p.has_bias) * p.columns, begin, end, scratch, partial);
  });
}

// Computes kVectors registers of the sum of one segment (SegmentSums in kernels.h), starting at
// column n. Each group of kGroupRows rows is summed in fp32, and the sums of the groups are added
// in double precision.
template <class From, class To, int kVectors>
FASTBERT_INLINE void sum_segment(const SegmentSums& p, int64_t segment, int64_t n, int count) {
  DoubleVec low[kVectors] = {}, high[kVectors] = {};
  const int64_t end = p.starts[segment + 1];
  for (int64_t i = p.starts[segment]; i < end;) {
    const int64_t group_end = end - i < kGroupRows ? end : i + kGroupRows;
    Vec total[kVectors] = {};
    for (; i < group_end; ++i) {
      const int64_t place = (p.order ? p.order[i] : i) * p.stride + n;
      const auto* row = (const typename From::Storage*)p.rows + place;
      for (int j = 0; j < kVectors; ++j) total[j] += From::load(row + j * kLanes, count);
    }
    for (int j = 0; j < kVectors; ++j) {
      low[j] += widen(total[j], 0);
      high[j] += widen(total[j], 1);
    }
  }
  auto* out = (typename To::Storage*)p.out + p.targets[segment] * p.out_stride + n;
  for (int j = 0; j < kVectors; ++j) {
    Vec v;
    for (int half = 0; half < 2; ++half) {
      const FloatHalf narrow = __builtin_convertvector(half ? high[j] : low[j], FloatHalf);
      __builtin_memcpy((char*)&v + half * sizeof(narrow), &narrow, sizeof(narrow));
    }
    To::store(out + j * kLanes, v, count);
  }
}

template <class From, class To>
void sum_segments_of(const SegmentSums& params, int64_t begin, int64_t end) {
  const SegmentSums p = params;
  const int64_t strips = (p.columns + kStripColumns - 1) / kStripColumns;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t segment = unit / strips;
    int64_t n = unit % strips * kStripColumns;
    const int64_t last = n + kStripColumns < p.columns ? n + kStripColumns : p.columns;
    for (; n + 4 * kLanes <= last; n += 4 * kLanes) sum_segment<From, To, 4>(p, segment, n, kLanes);
    for (; n + kLanes <= last; n += kLanes) sum_segment<From, To, 1>(p, segment, n, kLanes);
    if (n < last) sum_segment<From, To, 1>(p, segment, n, (int)(last - n));
  }
}

void sum_segments(const SegmentSums& p, int64_t begin, int64_t end) {
  with_format(p.format, [&](auto from) {
    with_format(p.out_format,
                [&](auto to) { sum_segments_of<decltype(from), decltype(to)>(p, begin, end); });
  });
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
