// The epilogue of a turned product (kernel.h) whose result is the packed right operand of the next
// product. A row of sums already has the layout of a row of that operand's panel, because a column
// of the result is one step along k of the next product. The epilogue therefore stores the sums
// from registers directly to the panels (packing.h), without a transposition.

#pragma once

#include "epilogue.h"
#include "packing.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// Returns v rounded to the format `To`, as if it had been stored and loaded again.
template <class To>
FASTBERT_INLINE Vec as_stored(Vec v) {
  return kIsBF16<To> ? BF16::widen(narrow_normal(v)) : To::widen(To::narrow(v));
}

template <>
FASTBERT_INLINE Vec as_stored<F32>(Vec v) {
  return v;
}

// A panel of the next product's right operand, with words in fp32.
struct WidePanel {
  float* words;

  // Stores kLanes columns of the rows k and k + 1 in the lower (half = 0) or upper half of the
  // panel.
  template <class To>
  FASTBERT_INLINE void store_pair(int64_t k, int half, const Vec (&v)[2]) const {
    float* p = words + k * kPanel + half * kLanes;
    for (int i = 0; i < 2; ++i) store(p + i * kPanel, as_stored<To>(v[i]));
  }
};

#if defined(FASTBERT_LEVEL_DOTS) || defined(FASTBERT_LEVEL_TILES)
// Returns words with the elements of `even` in the low halves and the elements of `odd` in the high
// halves. The rounding is that of narrow_normal.
FASTBERT_INLINE WordVec narrow_pairs(Vec even, Vec odd) {
#if FASTBERT_INTRINSIC_BYTES != 64
  return bits_of(narrow_normal(even)) | bits_of(narrow_normal(odd)) << 16;
#else
  using Halves = uint16_t __attribute__((vector_size(64)));
  const Halves v = (Halves)narrow_both(even, odd);
  return (WordVec)__builtin_shufflevector(v, v, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7,
                                          23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30,
                                          15, 31);
#endif
}

// A panel of the next product's right operand, with pairs of bf16 along k. At levels with AMX
// tiles, a step along k has two tiles of 16 pairs.
struct PairPanel {
#if defined(FASTBERT_LEVEL_TILES)
  static constexpr int64_t kPairs = kStep / 2, kHalf = kPairs * kLanes, kPair = kLanes;
#else
  static constexpr int64_t kPairs = 1, kHalf = kLanes, kPair = kPanel;
#endif
  uint32_t* words;
#if defined(FASTBERT_LEVEL_MATRICES)
  int64_t count;  // words of a column
#endif

  template <class>
  FASTBERT_INLINE void store_pair(int64_t k, int half, const Vec (&v)[2]) const {
    const int64_t pair = k / 2;
#if defined(FASTBERT_LEVEL_MATRICES)
    const Vec &even = v[0], &odd = v[1];
    const WordVec pairs = narrow_pairs(even, odd);
    for (int i = 0; i < kLanes; ++i) {
      words[place_of_word(pair, half * kLanes + i, count)] = pairs[i];
    }
#else
    uint32_t* p = words + pair / kPairs * kPairs * kPanel + pair % kPairs * kPair + half * kHalf;
    const WordVec both = narrow_pairs(v[0], v[1]);
    __builtin_memcpy(p, &both, sizeof(both));
#endif
  }
};
#endif

// Writes function(sums + bias), in the format `To`, to `panel` for kRows rows of the tile,
// starting at row `row`. kRows must be even. Row 0 of the tile corresponds to row `first` of the
// panel.
template <class To, class Function, int kRows, class Panel>
FASTBERT_INLINE void pack_rows(const Epilogue& e, const Tile& tile, int row, const Panel& panel,
                               int64_t first) {
  Vec v[2 * kRows];
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < kRows; ++i) {
      Vec& own = v[half * kRows + i];
      own = load(tile.sums + (row + i) * tile.stride + half * kLanes);
      if (e.bias) own += splat(e.bias[tile.row + row + i]);
    }
  }
  Function::apply(v);
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < kRows; i += 2) {
      const Vec pair[2] = {v[half * kRows + i], v[half * kRows + i + 1]};
      panel.template store_pair<To>(first + row + i, half, pair);
    }
  }
}

template <class To, class Function, class Panel>
FASTBERT_INLINE void pack_pass(const Epilogue& e, const Tile& tile, const Panel& panel) {
  for (int row = 0; row < tile.rows; row += 2) {
    pack_rows<To, Function, 2>(e, tile, row, panel, tile.row);
  }
}

template <class To, class Panel>
FASTBERT_INLINE void activate_packed(const Epilogue& e, const Tile& tile, const Panel& panel) {
  with_activation<To>(e.activation, [&](auto function) __attribute__((always_inline)) {
    pack_pass<To, decltype(function)>(e, tile, panel);
  });
}

#if defined(FASTBERT_LEVEL_DOTS) || defined(FASTBERT_LEVEL_TILES)
// Returns the panel of the next product that contains the columns of the tile.
FASTBERT_INLINE PairPanel next_pairs(const Epilogue& e, const Tile& tile) {
  auto* words = (uint32_t*)e.next + tile.column * (e.n / 2);
#if defined(FASTBERT_LEVEL_MATRICES)
  return {words, e.n / 2};
#else
  return {words};
#endif
}
#endif

// Runs the epilogue of a tile that is as wide as a panel and has an even number of rows. Rows of
// the tile are columns of the result, and columns of the tile are rows of the result. Columns of
// the tile beyond the last row of the result may hold any values, because no result depends on
// them.
__attribute__((noinline)) void finish_packed(const Epilogue& e, const Tile& tile) {
#if defined(FASTBERT_LEVEL_DOTS)  // At a level with AMX tiles, pieces.h finishes pairs.
  if (e.next_format == Format::bf16) return activate_packed<BF16>(e, tile, next_pairs(e, tile));
#endif
  const WidePanel panel = {(float*)e.next + tile.column * e.n};
  with_format(e.out_format, [&](auto type) __attribute__((always_inline)) {
    activate_packed<decltype(type)>(e, tile, panel);
  });
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
