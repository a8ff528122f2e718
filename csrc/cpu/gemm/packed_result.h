// The epilogue of a turned product whose result is the right operand of the next product. The sums
// of a block lie as this operand does: a row of sums is a step along k of the next product. So they
// go from the registers to its panels, and nothing is transposed.

#pragma once

#include "epilogue.h"
#include "packing.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// Returns v rounded to the format `To`, as a result that is stored and read again.
template <class To>
FASTBERT_INLINE Vec as_stored(Vec v) {
  return kIsBF16<To> ? BF16::widen(narrow_normal(v)) : To::widen(To::narrow(v));
}

template <>
FASTBERT_INLINE Vec as_stored<F32>(Vec v) {
  return v;
}

// A panel of the next product's operand, and its rows of words in fp32.
struct WidePanel {
  float* words;

  template <class To>
  FASTBERT_INLINE void store_pair(int64_t k, const Vec (&v)[4]) const {
    for (int i = 0; i < 4; ++i) store(words + k * kPanel + i * kLanes, as_stored<To>(v[i]));
  }
};

#if defined(FASTBERT_LEVEL_DOTS) || defined(FASTBERT_LEVEL_TILES)
// The same in pairs of bf16 along k. At levels with tiles, a step has two tiles of 16 pairs.
struct PairPanel {
#if defined(FASTBERT_LEVEL_TILES)
  static constexpr int64_t kPairs = kStep / 2, kHalf = kPairs * kLanes, kPair = kLanes;
#else
  static constexpr int64_t kPairs = 1, kHalf = kLanes, kPair = kPanel;
#endif
  uint32_t* words;

  template <class>
  FASTBERT_INLINE void store_pair(int64_t k, const Vec (&v)[4]) const {
    const int64_t pair = k / 2;
    uint32_t* p = words + pair / kPairs * kPairs * kPanel + pair % kPairs * kPair;
    for (int half = 0; half < 2; ++half) {
      const WordVec even = bits_of(narrow_normal(v[half]));
      const WordVec odd = bits_of(narrow_normal(v[2 + half]));
      const WordVec both = even | odd << 16;
      __builtin_memcpy(p + half * kHalf, &both, sizeof(both));
    }
  }
};
#endif

// Writes function(sums + bias) in the format `To`, two rows of sums at a time.
template <class To, class Function, class Panel>
FASTBERT_INLINE void pack_pass(const Epilogue& e, const Tile& tile, const Panel& panel) {
  for (int row = 0; row < tile.rows; row += 2) {
    Vec v[4];
    for (int i = 0; i < 4; ++i) {
      const int64_t k = row + i / 2;
      v[i] = load(tile.sums + k * tile.stride + i % 2 * kLanes);
      if (e.bias) v[i] += splat(e.bias[tile.row + k]);
    }
    Function::apply(v);
    panel.template store_pair<To>(tile.row + row, v);
  }
}

template <class To, class Panel>
FASTBERT_INLINE void activate_packed(const Epilogue& e, const Tile& tile, const Panel& panel) {
  switch (e.activation) {
    case Activation::none:
      return pack_pass<To, Same>(e, tile, panel);
    case Activation::gelu:
      return pack_pass<To, GeluTo<To>>(e, tile, panel);
    case Activation::gelu_tanh:
      return pack_pass<To, Each<GeluTanh>>(e, tile, panel);
    case Activation::relu:
      return pack_pass<To, Each<Relu>>(e, tile, panel);
    case Activation::geglu:  // Gated activations need whole rows.
    case Activation::swiglu:
      __builtin_unreachable();
  }
}

// Finishes a tile of a panel's width and an even number of rows, which are columns of the result.
// The columns of the tile are rows of the result; columns beyond the last row are never read.
__attribute__((noinline)) void finish_packed(const Epilogue& e, const Tile& tile) {
#if defined(FASTBERT_LEVEL_DOTS) || defined(FASTBERT_LEVEL_TILES)
  if (e.next_format == Format::bf16) {
    const PairPanel panel = {(uint32_t*)e.next + tile.column * (e.n / 2)};
    return activate_packed<BF16>(e, tile, panel);
  }
#endif
  const WidePanel panel = {(float*)e.next + tile.column * e.n};
  with_format(e.out_format, [&](auto type) __attribute__((always_inline)) {
    activate_packed<decltype(type)>(e, tile, panel);
  });
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
