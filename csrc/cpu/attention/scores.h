// The logits of attention for one block of queries and one block of keys: q kᵀ scale + bias, or
// -inf where the window or the mask excludes a key. The file also has functions that several
// attention kernels share.

#pragma once

#include "../isa/exp.h"
#include "product.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

constexpr int64_t kQueries = kAttentionQueries, kKeys = kAttentionKeys;
// The number of elements between rows of scores. It is not a power of two, because a power of two
// would map all rows to a few sets of the cache.
constexpr int64_t kScoreStride = kKeys + 16;
constexpr float kInfinity = __builtin_inff();

// Returns exp(-u) for u >= 0, computed by exp_negative (exp.h), and NaN if u is NaN.
FASTBERT_INLINE Vec exp_minus(Vec u) {
  const Vec e = exp_negative(u);
  return (Vec)((WordVec)e | (WordVec)(u != u));
}

FASTBERT_INLINE float exp_minus(float u) { return exp_minus(splat(u))[0]; }

FASTBERT_INLINE float largest(Vec v) {
  float x = v[0];
  for (int i = 1; i < kLanes; ++i) x = v[i] > x ? v[i] : x;
  return x;
}

// Returns the sum of the lanes of v. Adding the lanes in pairs gives a smaller rounding error than
// adding one lane after another.
FASTBERT_INLINE float total(Vec v) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) v[i] += v[i + step];
  }
  return v[0];
}

// Hands out consecutive pieces of a memory area, each aligned to 64 bytes.
struct Arena {
  char* next;

  template <class T>
  FASTBERT_INLINE T* take(int64_t count) {
    T* taken = (T*)next;
    next += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    return taken;
  }
};

FASTBERT_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

struct RelativeTables;  // relative.h

// One head of one sequence.
struct Head {
  int64_t sequence, head;
  int64_t q_start, q_length, k_start, k_length;
  // One flag for each key: nonzero if any query attends to the key. The pointer is null if there is
  // no mask and no window, so that every key is used.
  const uint32_t* used;
  // The gathered tables of relative positions; null if there are none.
  const RelativeTables* relative = nullptr;
};

FASTBERT_INLINE Head head_of(const Attention& a, int64_t sequence, int64_t head) {
  if (a.cu_q == nullptr) return {sequence, head, 0, a.max_q, 0, a.max_k, nullptr};
  const int64_t q = a.cu_q[sequence], k = a.cu_k[sequence];
  return {sequence, head, q, a.cu_q[sequence + 1] - q, k, a.cu_k[sequence + 1] - k, nullptr};
}

// Returns the address of row `start` of the head. Rows are numbered within the sequence or, in a
// packed batch, over all sequences.
template <class F>
FASTBERT_INLINE const typename F::Storage* first_row(const Attention& a, const Head& h,
                                                     const ConstRows& rows, int64_t start) {
  const int64_t batch = a.cu_q == nullptr ? h.sequence : 0;
  return (const typename F::Storage*)rows.data + batch * rows.batch + h.head * rows.head +
         start * rows.row;
}

template <class F>
FASTBERT_INLINE typename F::Storage* first_row(const Attention& a, const Head& h, const Rows& rows,
                                               int64_t start) {
  return (typename F::Storage*)first_row<F>(
      a, h, ConstRows{rows.data, rows.batch, rows.head, rows.row}, start);
}

template <class T>
FASTBERT_INLINE T* statistic(const Attention& a, const Head& h, T* data) {
  const int64_t batch = a.cu_q == nullptr ? h.sequence : 0;
  return data + batch * a.lse_batch + h.head * a.lse_head + h.q_start;
}

struct Range {
  int64_t low, high;
};

// Returns the range of keys that are inside the window of at least one of the queries [first,
// last].
FASTBERT_INLINE Range visible_keys(const Attention& a, const Head& h, int64_t first, int64_t last) {
  const int64_t offset = h.k_length - h.q_length;
  const int64_t low = a.left < 0 ? 0 : clamp(first + offset - a.left, 0, h.k_length);
  const int64_t high =
      a.right < 0 ? h.k_length : clamp(last + offset + a.right + 1, low, h.k_length);
  return {low, high};
}

FASTBERT_INLINE const uint8_t* mask_row(const Attention& a, const Head& h, int64_t query) {
  return (const uint8_t*)a.mask.data + h.sequence * a.mask.batch + h.head * a.mask.head +
         query * a.mask.row;
}

// Sets used[n] for every key n of the head: to all ones if any query attends to the key, and to 0
// otherwise. Returns `used`. If there is no mask and no window, every key is used, and the function
// sets nothing and returns null. A key that no query attends to may contain NaN, and 0 * NaN is
// NaN, so the kernels read such a key as zeros.
inline const uint32_t* used_keys(const Attention& a, const Head& h, uint32_t* used) {
  if (a.mask.data == nullptr && a.left < 0 && a.right < 0) return nullptr;
  for (int64_t n = 0; n < h.k_length; ++n) used[n] = 0;
  const bool every_query = a.mask.data != nullptr && a.mask.row != 0;
  if (!every_query) {
    if (h.q_length == 0) return used;
    const Range keys = visible_keys(a, h, 0, h.q_length - 1);
    const uint8_t* mask = a.mask.data == nullptr ? nullptr : mask_row(a, h, 0);
    for (int64_t n = keys.low; n < keys.high; ++n) {
      used[n] = mask == nullptr || mask[n * a.mask.key] != 0 ? ~0u : 0u;
    }
    return used;
  }
  for (int64_t m = 0; m < h.q_length; ++m) {
    const Range keys = visible_keys(a, h, m, m);
    const uint8_t* mask = mask_row(a, h, m);
    for (int64_t n = keys.low; n < keys.high; ++n) used[n] |= mask[n * a.mask.key] != 0 ? ~0u : 0u;
  }
  return used;
}

FASTBERT_INLINE bool all_used(const Head& h, int64_t first, int64_t last) {
  if (h.used == nullptr) return true;
  uint32_t all = ~0u;
  for (int64_t n = first; n < last; ++n) all &= h.used[n];
  return all != 0;
}

FASTBERT_INLINE bool any_used(const Head& h, int64_t first, int64_t last) {
  if (h.used == nullptr) return first < last;
  uint32_t any = 0;
  for (int64_t n = first; n < last; ++n) any |= h.used[n];
  return any != 0;
}

// A block of logits. Row r belongs to query number `query` + r or, if `queries` is not null, to
// query number queries[r]; these numbers are ascending. Column n belongs to key number `key` + n
// for n < keys, and `key` is a multiple of kKeys.
struct Block {
  int64_t query, rows, key, keys;
  const int64_t* queries;

  FASTBERT_INLINE int64_t position(int64_t r) const {
    return queries != nullptr ? queries[r] : query + r;
  }
};

// The masking that the rows of a block of logits need.
struct Masking {
  bool needed;     // whether a (query, key) pair may be masked, or the last panel is padded
  bool every_row;  // whether the masked keys may differ between queries
};

FASTBERT_INLINE Masking masking(const Attention& a, const Head& h, const Block& block) {
  const int64_t offset = h.k_length - h.q_length;
  const int64_t first = block.position(0), last = block.position(block.rows - 1);
  const bool window = (a.left >= 0 && block.key < last + offset - a.left) ||
                      (a.right >= 0 && block.key + block.keys > first + offset + a.right + 1);
  const bool pairs = a.mask.data != nullptr && a.mask.row != 0;
  const bool tail = block.keys % kPanel != 0;
  const bool hidden = !all_used(h, block.key, block.key + block.keys);
  return {window || pairs || tail || hidden, window || pairs};
}

// Sets allowed[n] to all ones if the query of row r may attend to key n of the block, and to 0
// otherwise. The elements after the last key, up to the end of the last panel, are set to 0.
inline void allowed_keys(const Attention& a, const Head& h, const Block& block, int64_t r,
                         uint32_t* allowed) {
  const int64_t query = block.position(r), width = whole_panels(block.keys);
  const Range seen = visible_keys(a, h, query, query);
  const int64_t low = clamp(seen.low - block.key, 0, block.keys);
  const int64_t high = clamp(seen.high - block.key, low, block.keys);
  for (int64_t n = 0; n < width; ++n) allowed[n] = n >= low && n < high ? ~0u : 0u;
  if (a.mask.data == nullptr) return;
  if (a.mask.row == 0) {
    for (int64_t n = low; n < high; ++n) allowed[n] = h.used[block.key + n];
    return;
  }
  const uint8_t* mask = mask_row(a, h, query) + block.key * a.mask.key;
  for (int64_t n = low; n < high; ++n) allowed[n] = mask[n * a.mask.key] != 0 ? ~0u : 0u;
}

// Loads the bias of one query for all keys of the block, and converts the bias to fp32.
template <class F>
FASTBERT_INLINE void bias_row(const Attention& a, const Head& h, const Block& block, int64_t query,
                              float* to) {
  const auto* bias = (const typename F::Storage*)a.bias.data + h.sequence * a.bias.batch +
                     h.head * a.bias.head + query * a.bias.row + block.key * a.bias.key;
  for_each_vector(block.keys, [&](int64_t n, int count) {
    if (a.bias.key == 1) return store(to + n, F::load(bias + n, count));
    typename F::Storage gathered[kLanes] = {};
    for (int i = 0; i < count; ++i) gathered[i] = bias[(n + i) * a.bias.key];
    store(to + n, F::load(gathered, kLanes));
  });
}

inline void bias_row(const Attention& a, const Head& h, const Block& block, int64_t r, float* to) {
  const int64_t query = block.position(r);
  for (int64_t n = block.keys / kLanes * kLanes; n < whole_panels(block.keys); ++n) to[n] = 0.0f;
  if (a.bias.format == Format::f32) return bias_row<F32>(a, h, block, query, to);
  if (a.bias.format == Format::bf16) return bias_row<BF16>(a, h, block, query, to);
  return bias_row<F16>(a, h, block, query, to);
}

// Overwrites a row of the product q kᵀ with logits, and returns the largest logit.
template <bool kBias, bool kMask>
FASTBERT_INLINE float finish_row(float* scores, int64_t width, float scale, const float* bias,
                                 const uint32_t* allowed) {
  Vec maximum[2] = {splat(-kInfinity), splat(-kInfinity)};
  for (int64_t n = 0; n < width; n += kPanel) {
    for (int i = 0; i < 2; ++i) {
      const int64_t at = n + i * kLanes;
      Vec x = load(scores + at) * scale;
      if constexpr (kBias) x += load(bias + at);
      if constexpr (kMask) {
        IntVec keep;
        __builtin_memcpy(&keep, allowed + at, kBytes);
        x = select(keep, x, splat(-kInfinity));
      }
      store(scores + at, x);
      maximum[i] = select(x > maximum[i], x, maximum[i]);
    }
  }
  return largest(select(maximum[0] > maximum[1], maximum[0], maximum[1]));
}

void add_relative_terms(const Attention& a, const Head& h, const Block& block, const float* q,
                        const float* keys, float* scores, int64_t stride);

// Computes the logits of a block from `keys`, which are packed in panels. A logit is -inf where a
// query does not attend to a key, and in the columns that pad the last panel. `maximum` receives
// the largest logit of each row.
inline void logits(const Attention& a, const Head& h, const Block& block, const float* q,
                   const float* keys, float* scores, int64_t stride, float* maximum) {
  const int64_t width = whole_panels(block.keys);
  product<Update::store>({q, whole_panels(a.head_dim), 1}, block.rows, keys, a.head_dim * kPanel,
                         width / kPanel, a.head_dim, scores, stride);
  if (h.relative != nullptr) add_relative_terms(a, h, block, q, keys, scores, stride);
  const Masking masks = masking(a, h, block);
  const bool biased = a.bias.data != nullptr;
  alignas(64) uint32_t allowed[kKeys];
  alignas(64) float bias[kKeys];
  for (int64_t r = 0; r < block.rows; ++r) {
    if (masks.needed && (masks.every_row || r == 0)) allowed_keys(a, h, block, r, allowed);
    if (biased && (a.bias.row != 0 || r == 0)) bias_row(a, h, block, r, bias);
    float* row = scores + r * stride;
    maximum[r] = biased ? masks.needed ? finish_row<true, true>(row, width, a.scale, bias, allowed)
                                       : finish_row<true, false>(row, width, a.scale, bias, allowed)
                 : masks.needed ? finish_row<false, true>(row, width, a.scale, bias, allowed)
                                : finish_row<false, false>(row, width, a.scale, bias, allowed);
  }
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
