// The right operand of a product, a matrix W (n, k) whose rows are the columns of the operand,
// packed in panels (Goto and van de Geijn 2008).
//
// A panel holds kPanel columns, two registers wide, as a sequence of rows along k, so one step
// along k loads two registers. Rows consist of 32-bit words. A word holds one fp32 element or a
// pair of bf16 elements. If the level has a dot product of bf16 (FASTBERT_LEVEL_DOTS), the two
// elements of a pair are consecutive along k, and a step multiplies both. Otherwise, a word holds
// column j in its low half and column j + kLanes in its high half, and a shift and a mask convert
// them to fp32. At levels with AMX tiles, gemm/tile_kernel.h packs bf16 in a different layout, and
// at levels with FASTBERT_LEVEL_MATRICES, isa/matrix_dots.h joins neighbouring word rows.

#pragma once

#include "../isa/formats.h"
#include "../isa/kernels.h"
#include "../isa/pairs.h"
#include "../isa/transpose.h"
#include "../isa/vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// One row of a panel: kPanel elements in memory, two fp32 registers after loading.
template <class Format>
struct PanelRow {
  using Storage = typename Format::Storage;
  static FASTBERT_INLINE void load(const Storage* p, Vec& low, Vec& high) {
    low = Format::load(p, kLanes);
    high = Format::load(p + kLanes, kLanes);
  }
  static FASTBERT_INLINE void store(Storage* p, Vec low, Vec high) {
    Format::store(p, low, kLanes);
    Format::store(p + kLanes, high, kLanes);
  }
};

template <>
struct PanelRow<BF16> {
  using Storage = uint16_t;
  static FASTBERT_INLINE void load(const Storage* p, Vec& low, Vec& high) {
    WordVec pairs;
    __builtin_memcpy(&pairs, p, sizeof(pairs));
    low = (Vec)(pairs << 16);
    high = (Vec)(pairs & 0xffff0000u);
  }
  // Rounds as BF16::narrow does and leaves the result in the upper half of each word.
  static FASTBERT_INLINE WordVec rounded(Vec v) {
    const WordVec bits = (WordVec)v;
    const WordVec nearest = bits + 0x7fffu + ((bits >> 16) & 1u);
    return choose((IntVec)(v != v), bits | 0x400000u, nearest);
  }
  static FASTBERT_INLINE void store(Storage* p, Vec low, Vec high) {
    const WordVec pairs = rounded(low) >> 16 | (rounded(high) & 0xffff0000u);
    __builtin_memcpy(p, &pairs, sizeof(pairs));
  }
};

#if defined(FASTBERT_LEVEL_DOTS)
// Words that hold two consecutive elements along k.
struct BF16Dots {
  using Storage = uint32_t;
};

template <>
struct PanelRow<BF16Dots> {
  using Storage = uint32_t;
  static FASTBERT_INLINE void load(const Storage* p, Vec& low, Vec& high) {
    low = FASTBERT_LEVEL::load((const float*)p);
    high = FASTBERT_LEVEL::load((const float*)p + kLanes);
  }
};

using BF16Operand = BF16Dots;
#else
using BF16Operand = BF16;
#endif

template <class Operand>
constexpr bool kIsDots = false;
#if defined(FASTBERT_LEVEL_DOTS)
template <>
constexpr bool kIsDots<BF16Dots> = true;
#endif

// Returns the number of words that hold k consecutive elements along k.
template <class Operand>
FASTBERT_INLINE int64_t words_of(int64_t k) {
  return kIsDots<Operand> ? (k + 1) / 2 : k;
}

// Returns the format in which a turned product (kernel.h) packs x. bf16 stays bf16 if the level has
// a dot product of bf16. Otherwise, rows in 16 bits are converted to fp32 once, while they are
// packed, because the product would convert them again for every tile of rows of the weight.
Format right_format(Format format) {
  return format == Format::bf16 && kIsDots<BF16Operand> ? Format::bf16 : Format::f32;
}

// Calls body(operand) with an object of the type that stands for a right operand in `format`.
template <class Body>
FASTBERT_INLINE void with_operand(Format format, Body body) {
  switch (format) {
    case Format::f32:
      return body(F32{});
    case Format::bf16:
      return body(BF16Operand{});
    case Format::f16:
      return body(F16{});
  }
}

FASTBERT_INLINE int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }

int64_t packed_bytes(Format to, int64_t n, int64_t k) {
  int64_t row = 0;
  with_operand(to, [&](auto type) {
    using Operand = decltype(type);
    row = words_of<Operand>(k) * sizeof(typename Operand::Storage);
  });
  return panels_of(n) * kPanel * row;
}

int64_t pack_units(int64_t n) { return panels_of(n); }

// Loads a register from each of `count` rows and transposes: lane i of block[j] is element j of row
// i.
template <class Format>
FASTBERT_INLINE void load_transposed(const typename Format::Storage* p, int64_t row_stride,
                                     int count, int length, Vec (&block)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    block[i] = i < count ? Format::load(p + i * row_stride, length) : Vec{};
  }
  transpose(block);
}

// Packs the columns of a panel as words of two consecutive elements along k. A column of the panel
// is a row of W: `row` is the stride of W from one row to the next, and `column` is the stride from
// one element of a row to the next.
template <class From>
void pack_dots(const typename From::Storage* p, int64_t row, int64_t column, int low, int high,
               int64_t k, uint32_t* packed) {
  for (int64_t first = 0; first < k; first += kLine, p += kLine * column) {
    const int depth = clamp_count(k - first, kLine);
    Vec lows[kLanes], highs[kLanes];
    load_pairs<From>(p, row, column, low, depth, lows);
    load_pairs<From>(p + low * row, row, column, high, depth, highs);
#if defined(FASTBERT_LEVEL_MATRICES)
    int i = 0;
    for (; i + 1 < (depth + 1) / 2; i += 2, packed += 2 * kPanel) {
      store_word_pair(packed, lows[i], lows[i + 1]);
      store_word_pair(packed + kPanel, highs[i], highs[i + 1]);
    }
    if (i == (depth + 1) / 2) continue;
    store((float*)packed, lows[i]);
    store((float*)packed + kLanes, highs[i]);
#else
    for (int i = 0; i < (depth + 1) / 2; ++i, packed += kPanel) {
      store((float*)packed, lows[i]);
      store((float*)packed + kLanes, highs[i]);
    }
#endif
  }
}

template <class From, class To>
void pack_panel(const Packing& params, int64_t panel) {
  const Packing p = params;
  using Row = PanelRow<To>;
  const int64_t first = panel * kPanel;
  const auto* weight = (const typename From::Storage*)p.weight + first * p.row;
  auto* packed = (typename Row::Storage*)p.packed + first * words_of<To>(p.k);
  const int low = clamp_count(p.n - first, kLanes), high = clamp_count(p.n - first - low, kLanes);
  if constexpr (kIsDots<To>) {
    pack_dots<From>(weight, p.row, p.column, low, high, p.k, packed);
  } else if (p.column != 1) {
    for (int64_t k = 0; k < p.k; ++k, weight += p.column) {
      Row::store(packed + k * kPanel, gather<From>(weight, p.row, low),
                 gather<From>(weight + low * p.row, p.row, high));
    }
  } else {
    for (int64_t k = 0; k < p.k; k += kLanes) {
      const int length = clamp_count(p.k - k, kLanes);
      Vec lows[kLanes], highs[kLanes];
      load_transposed<From>(weight + k, p.row, low, length, lows);
      load_transposed<From>(weight + low * p.row + k, p.row, high, length, highs);
      for (int i = 0; i < length; ++i) Row::store(packed + (k + i) * kPanel, lows[i], highs[i]);
    }
  }
}

// Rounds the elements as products do that read them as they are stored.
void round_rows(const Rounding& r, int64_t begin, int64_t end) {
  with_format(r.format, [&](auto format) {
    using To = decltype(format);
    for (int64_t row = begin; row < end; ++row) {
      const float* from = r.from + row * r.row;
      auto* to = (typename To::Storage*)r.to + row * r.columns;
      int64_t k = 0;
      if constexpr (kIsBF16<To> && kIsDots<BF16Operand>) {
        for (; k + kLine <= r.columns; k += kLine) {
          store((float*)(to + k),
                narrow_both(F32::load(from + k, kLanes), F32::load(from + k + kLanes, kLanes)));
        }
      }
      for (; k < r.columns; k += kLanes) {
        const int lanes = clamp_count(r.columns - k, kLanes);
        To::store(to + k, F32::load(from + k, lanes), lanes);
      }
    }
  });
}

void pack(const Packing& p, int64_t begin, int64_t end) {
  with_format(p.from, [&](auto from) {
    with_operand(p.to, [&](auto to) {
      for (int64_t panel = begin; panel < end; ++panel) {
        pack_panel<decltype(from), decltype(to)>(p, panel);
      }
    });
  });
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
