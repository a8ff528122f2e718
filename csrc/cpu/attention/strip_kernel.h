// Attention forward in bf16 with AMX tiles or bf16 products, for kStrip queries and kKeys keys at a
// time. The algorithm is that of forward_kernel.h.
//
// A block of keys is packed once per item and used for all queries of the item. In the packed right
// operand of q kᵀ, each word holds two consecutive elements of one key, and packing transposes
// blocks of 16 x 16 words. P denotes the softmax weights. In the packed right operand of P v, each
// word holds the same element of two consecutive keys, and packing interleaves pairs of rows of v.
//
// Scores are stored as one row per query. The exponentials then have the layout of the left operand
// of P v, and masks, bias, windows and dropout work row by row, as in forward_kernel.h. With one
// row per key instead (k qᵀ), no reductions along rows would be needed, but v and the result would
// have to be transposed. In this kernel, each of 16 rows is reduced to one register. A
// transposition of these 16 registers then gives one register of 16 maxima (or sums), and the
// running softmax works on 16 rows at once.
//
// The maximum, sum and result of a row depend on the row's own sequence alone. Blocks of keys begin
// at multiples of kKeys, and a key to which a query does not attend adds zeros to the row.

#pragma once

#include "forward_kernel.h"
#if defined(FASTBERT_LEVEL_TILES)
#include "strip_tiles.h"
#else
#include "strip_dots.h"
#endif
#include "strip_relative.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// The number of elements between rows of weights. It is not a power of two, for the same reason as
// kScoreStride (scores.h).
constexpr int64_t kWeightStride = kKeys + kStep;

struct StripMemory {
  uint32_t *used, *begun;  // begun[i]: whether `out` has a result for strip i of queries
  uint16_t *q, *kept_rows;
  char *keys, *values;
  float *out, *maximum, *sum, *factors;
  // If products overlap with the softmax, consecutive strips use the two buffers of weights and the
  // two buffers of scores alternately.
  uint16_t* weights[2];
  float* scores[2];
  // The tables of relative positions, if there are any, and their memory.
  StripTables relative;
  char* relative_memory;

  StripMemory(const Attention& a, int64_t rows, Arena& arena) {
    const int64_t width = whole_panels(a.head_dim), all = whole_strips(rows);
    used = arena.take<uint32_t>(a.max_k);
    begun = arena.take<uint32_t>(all / kStrip);
    q = arena.take<uint16_t>(all * width);
    kept_rows = arena.take<uint16_t>(kKeys * width);
    keys = arena.take<char>(2 * kKeys * width);
    values = arena.take<char>(2 * kKeys * width);
    out = arena.take<float>(all * width);
    maximum = arena.take<float>(all);
    sum = arena.take<float>(all);
    factors = arena.take<float>(kStrip);
    for (int i = 0; i < (kMayOverlap ? 2 : 1); ++i) {
      weights[i] = arena.take<uint16_t>(kStrip * kWeightStride);
      scores[i] = arena.take<float>(kStrip * kScoreStride);
    }
    if (!kMayOverlap) weights[1] = weights[0], scores[1] = scores[0];
    relative_memory = arena.take<char>(strip_relative_scratch(a, rows));
  }
};

// Returns 2^t for t <= 0. The result is 0 where 2^t is smaller than the smallest normal float, and
// NaN where t is NaN. The relative error of 3e-6 is small enough, because the results are rounded
// to bf16.
FASTBERT_INLINE Vec exp2_negative(Vec t) {
  // Adding kRound rounds t to an integer. The low bits of the sum are this integer plus the
  // exponent bias of fp32.
  constexpr float kRound = 12582912.0f + 127.0f;
  const Vec bounded = greatest(splat(-127.0f), t);
  const Vec shifted = bounded + kRound;
  const Vec f = bounded - (shifted - kRound);
  // The polynomial is minimax on [-1/2, 1/2] with the constraint that it is exact at 0. A row of
  // equal logits therefore has exact weights.
  Vec p = fma(splat(9.582855474e-3f), f, splat(5.590643085e-2f));
  p = fma(p, f, splat(2.402409861e-1f));
  p = fma(p, f, splat(6.931241927e-1f));
  p = fma(p, f, splat(1.0f));
  return p * (Vec)((IntVec)shifted << 23);
}

constexpr float kLog2E = 1.44269504f;

FASTBERT_INLINE Vec larger(Vec a, Vec b) { return greatest(b, a); }

// Returns the rows of k or v (`from`) for the keys [key, key + keys) of the head, and sets `stride`
// to the number of elements between two rows. If no query attends to some of these keys, the rows
// of such keys may contain NaN. The function then returns a copy in `kept`, in which such rows are
// zeros.
inline const uint16_t* rows_of_keys(const Attention& a, const Head& h, const ConstRows& from,
                                    int64_t key, int64_t keys, uint16_t* kept, int64_t& stride) {
  const uint16_t* rows = first_row<BF16>(a, h, from, h.k_start) + key * from.row;
  stride = from.row;
  if (all_used(h, key, key + keys)) return rows;
  for (int64_t n = 0; n < keys; ++n) {
    for (int64_t d = 0; d < a.head_dim; ++d) {
      kept[n * a.head_dim + d] = h.used[key + n] ? rows[n * from.row + d] : (uint16_t)0;
    }
  }
  stride = a.head_dim;
  return kept;
}

// Prefetches `count` rows of a head. The rows are too far apart for the processor to prefetch them
// by itself.
inline void fetch_rows(const Attention& a, const uint16_t* rows, int64_t stride, int64_t count) {
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t d = 0; d < a.head_dim; d += kStep) __builtin_prefetch(rows + n * stride + d, 0, 3);
  }
}

inline void pack_keys(const Attention& a, const Head& h, int64_t key, int64_t keys,
                      const StripMemory& m) {
  int64_t stride;
  fetch_rows(a, first_row<BF16>(a, h, a.v, h.k_start) + key * a.v.row, a.v.row, keys);
  const uint16_t* k = rows_of_keys(a, h, a.k, key, keys, m.kept_rows, stride);
  for (int64_t n = 0; n < keys; n += kPanel) {
    pack_steps<BF16>(k + n * stride, stride, 1, keys - n, a.head_dim,
                     m.keys + n / kPanel * steps_of(a.head_dim) * kPanelStep);
  }
  const uint16_t* v = rows_of_keys(a, h, a.v, key, keys, m.kept_rows, stride);
  for (int64_t d = 0; d < a.head_dim; d += kPanel) {
    pack_steps<BF16>(v + d, 1, stride, a.head_dim - d, keys,
                     m.values + d / kPanel * steps_of(keys) * kPanelStep);
  }
}

// Returns the product q kᵀ of a strip of queries and a block of keys. The caller runs the steps of
// the product.
inline StripProduct product_of_keys(const uint16_t* q, int64_t width, int64_t keys, float* scores,
                                    const StripMemory& m) {
  return {q, width, m.keys, width / kStep, scores, kScoreStride, false, panels_of(keys)};
}

// Returns the product that adds P v of a block of keys to `out`. The caller runs the steps of the
// product. Before it returns, the function multiplies the rows of `out` by m.factors. For the first
// block of keys (`begins`), the product overwrites `out` instead.
inline StripProduct product_of_values(float* out, int64_t width, int64_t rows, int64_t keys,
                                      bool begins, const uint16_t* weights, const StripMemory& m) {
  for (int64_t r = 0; r < rows && !begins; ++r) {
    if (m.factors[r] == 1.0f) continue;
    for (int64_t n = 0; n < width; n += kLanes) {
      store(out + r * width + n, load(out + r * width + n) * m.factors[r]);
    }
  }
  return {weights, kWeightStride, m.values, steps_of(keys), out, width, !begins, width / kPanel};
}

// The products that run between the rows of a strip's softmax: first P v of the previous strip, and
// then q kᵀ of the next strip.
struct BesideSoftmax {
  StripProduct values, keys;
  bool any;

  FASTBERT_INLINE void advance() {
    if (!any) return;
    if (!values.done()) {
      values.advance();
    } else if (!keys.done()) {
      keys.advance();
    }
  }
};

FASTBERT_INLINE Vec row_maximum(const float* scores, int64_t width, float scale) {
  Vec maximum[2] = {splat(-kInfinity), splat(-kInfinity)};
  for (int64_t n = 0; n < width; n += kPanel) {
    maximum[0] = larger(maximum[0], load(scores + n) * scale);
    maximum[1] = larger(maximum[1], load(scores + n + kLanes) * scale);
  }
  return larger(maximum[0], maximum[1]);
}

// Writes exp(score * scale - maximum) for the scores of one row, after dropout and rounded to bf16.
// Returns the sums of the exponentials in each lane, before dropout and rounding. The score is
// multiplied by `scale` alone, and not by scale * kLog2E, so that the result of a row is the same
// with and without a mask.
FASTBERT_INLINE Vec row_weights(const float* scores, int64_t width, float scale, float maximum,
                                const uint32_t* kept, float kept_scale, uint16_t* weights) {
  Vec sum[2] = {};
  for (int64_t n = 0; n < width; n += kPanel) {
    for (int i = 0; i < 2; ++i) {
      const int64_t at = n + i * kLanes;
      Vec e = exp2_negative((load(scores + at) * scale - maximum) * kLog2E);
      sum[i] += e;
      if (kept) e = drop(e, kept + at, kept_scale, kLanes);
      const HalfVec bits = narrow_normal(e);
      __builtin_memcpy(weights + at, &bits, sizeof(bits));
    }
  }
  return sum[0] + sum[1];
}

// Reduces each of the registers in `rows`: lane i of the result combines all lanes of rows[i].
template <class Combine>
FASTBERT_INLINE Vec combine_lanes(Vec (&rows)[kLanes], Combine combine) {
  transpose(rows);
  Vec result = rows[0];
  for (int i = 1; i < kLanes; ++i) result = combine(result, rows[i]);
  return result;
}

// Converts the scores of a strip to weights, and updates the running maxima and sums of the strip.
// Writes one factor for each row to m.factors. The caller must multiply the row's result from
// earlier blocks of keys by this factor.
inline void strip_softmax(const Attention& a, const Head& h, const Block& block,
                          const StripMemory& m, int64_t first, int side, BesideSoftmax& beside) {
  const int64_t width = whole_panels(block.keys);
  const Masking masks = masking(a, h, block);
  const bool biased = a.bias.data != nullptr, plain = !masks.needed && !biased;
  // If `plain` is false, finish_row multiplies the scores by a.scale, and row_weights must not do
  // so again.
  const float scale = plain ? a.scale : 1.0f;
  alignas(64) uint32_t allowed[kKeys];
  alignas(64) uint32_t kept[kKeys];
  alignas(64) float bias[kKeys];
  alignas(64) float references[kLanes];
  for (int64_t group = 0; group < block.rows; group += kLanes) {
    const int rows = clamp_count(block.rows - group, kLanes);
    Vec values[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int64_t r = group + i;
      float* row = m.scores[side] + r * kScoreStride;
      values[i] = splat(-kInfinity);
      if (i >= rows) continue;
      if (plain) {
        values[i] = row_maximum(row, width, scale);
        continue;
      }
      if (masks.needed && (masks.every_row || r == 0)) allowed_keys(a, h, block, r, allowed);
      if (biased && (a.bias.row != 0 || r == 0)) bias_row(a, h, block, r, bias);
      values[i] =
          splat(biased ? masks.needed ? finish_row<true, true>(row, width, a.scale, bias, allowed)
                                      : finish_row<true, false>(row, width, a.scale, bias, allowed)
                       : finish_row<false, true>(row, width, a.scale, bias, allowed));
    }
    float* place = m.maximum + first + group;
    const Vec before = load(place);
    const Vec after =
        larger(before, combine_lanes(values, [&](Vec x, Vec y) __attribute__((always_inline)) {
                 return larger(x, y);
               }));
    // If a row has not attended to any key so far, `after` is -inf. The reference is then 0,
    // because the difference of two infinities would be NaN.
    const Vec reference = select(after == -kInfinity, Vec{}, after);
    const Vec factors = exp2_negative((before - reference) * kLog2E);
    store(place, after);
    store(m.factors + group, factors);
    store(references, reference);
    for (int i = 0; i < kLanes; ++i) {
      const int64_t r = group + i;
      values[i] = Vec{};
      if (i >= rows) continue;
      beside.advance();
      if (a.dropout.enabled) {
        attention_dropout(a.dropout, h, block.position(r), block.key, block.keys, kept);
      }
      values[i] = row_weights(m.scores[side] + r * kScoreStride, width, scale, references[i],
                              a.dropout.enabled ? kept : nullptr, a.dropout.scale,
                              m.weights[side] + r * kWeightStride);
    }
    const Vec sum =
        combine_lanes(values, [&](Vec x, Vec y) __attribute__((always_inline)) { return x + y; });
    store(m.sum + first + group, fma(load(m.sum + first + group), factors, sum));
  }
}

inline void begin_queries(const Attention& a, const Head& h, const AttentionItem& item,
                          const StripMemory& m) {
  const int64_t rows = item.end - item.begin, all = whole_strips(rows);
  const int64_t width = whole_panels(a.head_dim);
  const uint16_t* q = first_row<BF16>(a, h, a.q, h.q_start) + item.begin * a.q.row;
  for (int64_t r = 0; r < all; ++r) {
    for (int64_t d = 0; d < width; d += kStep) {
      const int depth = r < rows ? clamp_count(a.head_dim - d, kStep) : 0;
      store((float*)(m.q + r * width + d), load_line<BF16>(q + r * a.q.row + d, depth));
    }
    m.maximum[r] = -kInfinity;
    m.sum[r] = 0.0f;
    m.begun[r / kStrip] = 0;
  }
}

// Processes one block of keys for all strips of queries whose window includes a key of the block.
// While the softmax of one strip runs, the products of the previous and the next strip advance.
inline void strip_block(const Attention& a, const Head& h, const AttentionItem& item, int64_t key,
                        int64_t keys, const StripMemory& m) {
  const int64_t rows = item.end - item.begin, width = whole_panels(a.head_dim);
  const auto block_of = [&](int64_t first) {
    return Block{item.begin + first, clamp(rows - first, 0, kStrip), key, keys, nullptr};
  };
  // Returns the first row of the next strip whose window includes a key of the block. The search
  // begins with the strip at row `first`. Returns `rows` or more if there is no such strip.
  const auto seeing = [&](int64_t first) {
    for (; first < rows; first += kStrip) {
      const Block block = block_of(first);
      const Range range = visible_keys(a, h, block.query, block.query + block.rows - 1);
      if (key < range.high && key + keys > range.low) break;
    }
    return first;
  };
  const auto scores_of = [&](int64_t first, int side) {
    return product_of_keys(m.q + first * width, width, keys, m.scores[side], m);
  };
  int64_t first = seeing(0);
  int side = 0;
  BesideSoftmax beside = {{}, {}, overlaps()};
  if (first < rows) beside.keys = scores_of(first, side);
  while (first < rows) {
    beside.keys.finish();
    if (a.relative != nullptr) {
      add_strip_terms(a, h, m.relative, block_of(first), first, m.q + first * width,
                      m.scores[side]);
    }
    const int64_t next = seeing(first + kStrip);
    beside.keys = next < rows ? scores_of(next, 1 - side) : StripProduct{};
    const Block block = block_of(first);
    strip_softmax(a, h, block, m, first, side, beside);
    beside.values.finish();
    uint32_t& begun = m.begun[first / kStrip];
    beside.values = product_of_values(m.out + first * width, width, block.rows, keys, begun == 0,
                                      m.weights[side], m);
    begun = 1;
    if (!beside.any) beside.values.finish();
    first = next;
    side = 1 - side;
  }
  beside.values.finish();
}

inline void strip_item(const Attention& a, const AttentionItem& item, void* scratch) {
  Arena arena = {(char*)scratch};
  const int64_t rows = item.end - item.begin;
  StripMemory m(a, rows, arena);
  Head h = head_of(a, item.sequence, item.head);
  h.used = used_keys(a, h, m.used);
  if (a.relative != nullptr) {
    Arena memory = {m.relative_memory};
    m.relative = StripTables(a, item.begin, rows, h.k_length, memory);
    gather_strip_tables(a, h, m.relative);
  }
  const int64_t first_keys = clamp(h.k_length, 0, kKeys);
  fetch_rows(a, first_row<BF16>(a, h, a.k, h.k_start), a.k.row, first_keys);
  begin_queries(a, h, item, m);
  begin_strips();
  const Range seen = visible_keys(a, h, item.begin, item.end - 1);
  for (int64_t key = seen.low / kKeys * kKeys; key < seen.high; key += kKeys) {
    const int64_t keys = clamp(h.k_length - key, 0, kKeys);
    if (!any_used(h, key, key + keys)) continue;
    pack_keys(a, h, key, keys, m);
    if (a.relative != nullptr) {
      int64_t stride;
      const uint16_t* k = rows_of_keys(a, h, a.k, key, keys, m.kept_rows, stride);
      find_terms_of_keys(a, m.relative, k, stride, key, keys);
    }
    strip_block(a, h, item, key, keys, m);
  }
  end_strips();
  forward_results<BF16>(a, h, item, m);
}

// The attention functions in the kernel tables of the levels that have bf16 dot products or AMX
// tiles. They process bf16 tensors, and call the functions of forward_kernel.h for other formats.

int64_t attention_strip_scratch(const Attention& a, int64_t rows) {
  if (a.format != Format::bf16) return attention_scratch(a, rows);
  Arena arena = {nullptr};
  StripMemory(a, rows, arena);
  return (int64_t)(arena.next - (char*)nullptr);
}

void attention_strips(const Attention& a, const AttentionItem& item, void* scratch) {
  if (a.format != Format::bf16) return attention_forward(a, item, scratch);
  strip_item(a, item, scratch);
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
