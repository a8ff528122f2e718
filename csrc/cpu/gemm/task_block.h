// The tiles of a matrix product, and the blocks of a task that consist of tiles. kernel.h describes
// products and their division.

#pragma once

#include "../isa/formats.h"
#include "../isa/kernels.h"
#include "../isa/transpose.h"
#include "../isa/vec.h"
#include "epilogue.h"
#include "packed_result.h"
#include "packing.h"
#include "tasks.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// Rows of a tile: 2 registers of sums per row, and 3 for operands. At the levels of NEON, the left
// operand takes one more register per row.
#if defined(FASTBERT_LEVEL_NEON)
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = kBytes == 64 ? 14 : 6;
#endif
// Rows of a tile whose panel has at most kLanes columns in use: 1 register of sums per row.
constexpr int kHalfTileRows = kBytes == 64 ? 16 : 12;
constexpr int kDepth = 256;  // words along k in a block
constexpr int64_t kCacheLine = 64;
constexpr int64_t kMaxRows = kBytes == 64 ? 128 : 120, kMaxColumns = 1024;  // largest task

// Returns sum + x b for registers of words in the format of `Operand`: fp32, or pairs of bf16.
template <class Operand>
FASTBERT_INLINE Vec multiply_add(Vec x, Vec b, Vec sum) {
#if defined(FASTBERT_LEVEL_DOTS)
  if constexpr (kIsDots<Operand>) return dot_bf16(x, b, sum);
#endif
  return fma(x, b, sum);
}

// Returns sum + x b with *x in each lane of x.
template <class Operand>
FASTBERT_INLINE Vec multiply_add(const float* x, Vec b, Vec sum) {
#if defined(FASTBERT_LEVEL_DOTS)
  if constexpr (kIsDots<Operand>) return dot_bf16(x, b, sum);
#endif
  return fma(factor(*x), b, sum);
}

// Whether the products of an operand are those of matrix_dots.h, except for a last odd word.
#if defined(FASTBERT_LEVEL_MATRICES)
template <class Operand>
constexpr bool kInMatrices = kIsDots<Operand>;
#else
template <class Operand>
constexpr bool kInMatrices = false;
#endif

#if defined(FASTBERT_LEVEL_NEON)
// Returns sum + x b with lane kLane of x in each lane of x.
template <class Operand, int kLane>
FASTBERT_INLINE Vec multiply_add_lane(Vec x, Vec b, Vec sum) {
#if defined(FASTBERT_LEVEL_DOTS)
  if constexpr (kIsDots<Operand>) return dot_lane_bf16<kLane>(x, b, sum);
#endif
  return vfmaq_laneq_f32(sum, b, x, kLane);
}
#endif

// The block of the result that one task computes, and the scratch memory of the task: `panel` for
// one block of a panel in fp32, `a` for one block of the left operand in rows of kDepth words, and
// `sums`.
struct Task : GemmBlock {
  float *panel, *a, *sums;
  int64_t stride;   // elements between rows of `sums`
  bool one_by_one;  // whether `sums` holds one tile at a time
};

// Returns the number of elements between rows of sums. It is not a multiple of a page, so the rows
// of a tile do not evict each other from the cache.
FASTBERT_INLINE int64_t sums_stride(int64_t columns) { return panels_of(columns) * kPanel + 16; }

// The largest number of columns of a task in a turned product. One block of these columns' panels
// stays in the second-level cache while it is multiplied by the rows of W.
constexpr int64_t kMaxTurnedColumns = 128;

// The largest number of panels that the same rows are multiplied by at the same time.
constexpr int64_t kMostPanels = 4;

// Returns whether the epilogue of each tile runs directly after the product of the tile. This is
// possible if k is a single block. The sums of a tile then never leave the first-level cache, and a
// task may have any number of columns.
FASTBERT_INLINE bool tiles_finish_one_by_one(const Gemm& g) {
  bool single = false;
  if (g.turned) return false;
  with_operand(g.packed_format,
               [&](auto type) { single = words_of<decltype(type)>(g.k) <= kDepth; });
  return single;
}

// Returns v rounded to the precision of the format `To` if `From` is a wider format, and v
// otherwise.
template <class From, class To>
FASTBERT_INLINE Vec rounded_to(Vec v) {
  if constexpr (sizeof(typename From::Storage) > sizeof(typename To::Storage)) {
    return To::widen(To::narrow(v));
  } else {
    return v;
  }
}

// Copies `count` rows of the left operand, starting at row `begin`, to fp32 rows that are kDepth
// words apart. The copy has the elements [first, first + depth) of each row, rounded to `To`.
template <class Format, class To>
void pack_rows(const Gemm& g, int64_t begin, int64_t count, int64_t first, int64_t depth,
               float* out) {
  const auto* a = (const typename Format::Storage*)g.a + begin * g.a_row + first * g.a_column;
  if (g.a_column == 1) {
    for (int64_t row = 0; row < count; ++row) {
      for_each_vector(depth, [&](int64_t k, int lanes) __attribute__((always_inline)) {
        store(out + row * kDepth + k,
              rounded_to<Format, To>(Format::load(a + row * g.a_row + k, lanes)));
      });
    }
    return;
  }
  for (int64_t row = 0; row < count; row += kLanes) {
    const int rows = clamp_count(count - row, kLanes);
    for (int64_t k = 0; k < depth; k += kLanes) {
      Vec block[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int used = k + i < depth ? rows : 0;
        block[i] = rounded_to<Format, To>(
            gather<Format>(a + row * g.a_row + (k + i) * g.a_column, g.a_row, used));
      }
      transpose(block);
      for (int i = 0; i < rows; ++i) store(out + (row + i) * kDepth + k, block[i]);
    }
  }
}

// A place in the left operand: a row, and a word of this row.
struct LeftPlace {
  int64_t row, word;
};

// Copies rows as pack_rows does, but each word of the copy holds two consecutive elements along k
// in bf16, and `first` and `depth` count words. Rows with contiguous elements are copied one after
// another. While they are copied, as many rows from `next` on, which are copied later, are
// prefetched to the second-level cache.
template <class From>
void pack_row_pairs(const Gemm& g, int64_t begin, int64_t count, int64_t first, int64_t depth,
                    float* out, const LeftPlace& next) {
  using Storage = typename From::Storage;
  const auto* a = (const Storage*)g.a + begin * g.a_row;
  if (g.a_column == 1) {
    const int64_t far = (next.row - begin) * g.a_row + 2 * (next.word - first);
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t word = 0; word < depth; word += kLanes) {
        const int64_t k = 2 * (first + word);
        const auto* p = a + row * g.a_row + k;
        for (int64_t byte = 0; byte < kLine * (int64_t)sizeof(Storage); byte += kCacheLine) {
          __builtin_prefetch((const char*)(p + far) + byte, 0, 2);
        }
        store(out + row * kDepth + word, load_line<From>(p, clamp_count(g.k - k, kLine)));
      }
    }
    return;
  }
  for (int64_t row = 0; row < count; row += kLanes) {
    const int rows = clamp_count(count - row, kLanes);
    for (int64_t word = 0; word < depth; word += kLanes) {
      const int64_t k = 2 * (first + word);
      Vec words[kLanes];
      load_row_pairs<From>(a + row * g.a_row + k * g.a_column, g.a_row, g.a_column, rows,
                           clamp_count(g.k - k, kLine), words);
      for (int i = 0; i < rows; ++i) store(out + (row + i) * kDepth + word, words[i]);
    }
  }
}

// Copies the words [first, first + depth) of `count` rows of the left operand, starting at row
// `begin`. A word has the format of `Operand`: fp32, or a pair of bf16. The rows from `next` on are
// the next to be copied.
template <class Operand>
void pack_left_words(const Gemm& g, int64_t begin, int64_t count, int64_t first, int64_t depth,
                     float* out, const LeftPlace& next) {
  with_format(g.format, [&](auto type) {
    using From = decltype(type);
    if constexpr (kIsDots<Operand>) {
      pack_row_pairs<From>(g, begin, count, first, depth, out, next);
    } else {
      with_format(g.rounded, [&](auto rounded) {
        pack_rows<From, decltype(rounded)>(g, begin, count, first, depth, out);
      });
    }
  });
}

// The range of k that one product covers: `steps` steps along k, in chains of `chunk` additions.
// `add` tells whether the product is added to the sums of earlier blocks of k.
struct Depth {
  int64_t steps, chunk;
  bool add;
};

// Rows of the left operand as 32-bit words. Adjacent rows are `row` words apart.
struct LeftWords {
  const float* words;
  int64_t row;
};

// Returns whether the left operand is stored as words in the format of `Operand`, so that its rows
// need no copy.
template <class Operand>
FASTBERT_INLINE bool lies_in_words(const Gemm& g) {
  if (g.a_column != 1) return false;
  if constexpr (kIsDots<Operand>) {
    return g.format == Format::bf16 && g.k % 2 == 0 && g.a_row % 2 == 0 && (uintptr_t)g.a % 4 == 0;
  }
  return g.format == Format::f32 && g.rounded == Format::f32;
}

// Returns whether, for every k, element k of all rows of a tile maps to the same set of the
// first-level cache. Addresses that differ by a multiple of a page map to the same set, and a set
// has only 8 or 12 lines, so the rows would evict each other. Rows half a page apart use two sets
// and are not evicted.
FASTBERT_INLINE bool share_a_set(int64_t row_bytes) {
  constexpr int64_t kSetPeriod = 4096, kFewestWays = 8;
  return kTileRows > kFewestWays && row_bytes % kSetPeriod == 0;
}

// Returns whether the rows of W in a turned product are read as they are stored.
template <class Operand>
FASTBERT_INLINE bool is_in_place(const Gemm& g) {
  const int64_t size = g.format == Format::f32 ? 4 : 2;
  return lies_in_words<Operand>(g) && !share_a_set(g.a_row * size);
}

// The addresses to prefetch while a tile is multiplied: the next rows of the left operand, and the
// next panel. The lines of the panel are spread evenly over the steps of all tiles.
struct Next {
  const char *a, *b;
  int64_t row, step;  // bytes between rows of a; bytes of b to fetch per step
  int64_t steps;      // steps along k of the block
};

// Prefetches the cache lines of the next rows of the left operand, two lines in each call of
// `fetch`. If a block contains most of each row, all lines of one row come before the next row, so
// memory is read in order. Otherwise, each chunk of k prefetches the lines that the same chunk of
// the next tile will multiply.
class NextLines {
 public:
  FASTBERT_INLINE NextLines(const Next& next, int64_t begin) {
    const bool in_order = 2 * kWord * next.steps > next.row;
    pairs_ = in_order ? (next.steps + kSteps - 1) / kSteps : 4;
    skip_ = next.row - pairs_ * kPair;
    const int64_t passed = in_order ? begin / 2 : 0;
    left_ = pairs_ - passed % pairs_;
    line_ = next.a + (in_order ? passed * kPair + passed / pairs_ * skip_ : begin * kWord);
  }

  FASTBERT_INLINE void fetch() {
    __builtin_prefetch(line_, 0, 2);
    __builtin_prefetch(line_ + kCacheLine, 0, 2);
    line_ += kPair;
    if (--left_ == 0) line_ += skip_, left_ = pairs_;
  }

 private:
  static constexpr int64_t kWord = 4, kPair = 2 * kCacheLine, kSteps = kPair / kWord;
  const char* line_;
  int64_t pairs_, skip_, left_;
};

FASTBERT_INLINE Next next_of(const char* a, int64_t row, const char* panel, int64_t bytes,
                             int64_t steps, int64_t tile, int64_t tiles) {
  const int64_t step = bytes / (steps * tiles + 1) + 1;  // `steps` may be 0
  return {a, panel + tile * steps * step, row, step, steps};
}

// Computes sums = a bᵀ or, if `add`, sums += a bᵀ for kRows rows of a and kPanels panels of b, over
// the steps [begin, end) along k. The panels are `panel` elements apart. With `kHalf`, only the
// first kLanes columns of a panel are multiplied, and the sums of the other columns become 0.
template <class Format, int kRows, int kPanels, bool kHalf>
FASTBERT_INLINE void multiply_chunk(const LeftWords& a, const typename Format::Storage* b,
                                    int64_t panel, int64_t begin, int64_t end, float* sums,
                                    int64_t stride, bool add, Next next) {
  // There is one pointer for every three rows. A pointer for each row would need too many
  // registers, and a single pointer would need an addition for each row and step.
  constexpr int kPointers = (kRows + 2) / 3;
  const float* rows[kPointers];
  for (int i = 0; i < kPointers; ++i) rows[i] = a.words + 3 * i * a.row + begin;
  Vec total[kPanels][kRows][2] = {};
  const auto step = [&](int64_t k, int offset) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int j = 0; j < kPanels; ++j) {
      Vec low, high;
      PanelRow<Format>::load(b + j * panel + (k + offset) * kPanel, low, high);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const float* word = &rows[i / 3][i % 3 * a.row + offset];
        if constexpr (kHalf) {
          total[j][i][0] = multiply_add<Format>(word, low, total[j][i][0]);
          continue;
        }
        const Vec x = splat(*word);
        total[j][i][0] = multiply_add<Format>(x, low, total[j][i][0]);
        total[j][i][1] = multiply_add<Format>(x, high, total[j][i][1]);
      }
    }
  };
#if defined(FASTBERT_LEVEL_NEON)
  // One step along k, with the elements of the left operand in one lane of the registers `x`.
  const auto lane_step = [&](const Vec(&x)[kRows], int64_t k,
                             auto lane) __attribute__((always_inline)) {
    constexpr int kLane = decltype(lane)::value;
#pragma GCC unroll 4
    for (int j = 0; j < kPanels; ++j) {
      Vec low, high;
      PanelRow<Format>::load(b + j * panel + (k + kLane) * kPanel, low, high);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        total[j][i][0] = multiply_add_lane<Format, kLane>(x[i], low, total[j][i][0]);
        if constexpr (kHalf) continue;
        total[j][i][1] = multiply_add_lane<Format, kLane>(x[i], high, total[j][i][1]);
      }
    }
  };
#endif
  NextLines lines(next, begin);
  const char* far = next.b + begin * next.step;
  int64_t k = begin;
#if defined(FASTBERT_LEVEL_MATRICES)
  if constexpr (kInMatrices<Format>) {
    MatrixSums<kRows, kHalf ? kLanes : kPanel> matrices[kPanels] = {};
    for (; k + kLanes <= end; k += kLanes) {
      lines.fetch();
      lines.fetch();
      for (int i = 0; i < 4; ++i) __builtin_prefetch(far + i * kCacheLine, 0, 2);
      far += kLanes * next.step;
#pragma GCC unroll 4
      for (int j = 0; j < kPanels; ++j) {
        matrices[j].add_four(
            [&](int i) __attribute__((always_inline)) { return load(&rows[i / 3][i % 3 * a.row]); },
            b + j * panel + k * kPanel, 2 * kPanel);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kPointers; ++i) rows[i] += kLanes;
    }
    if (k + 2 <= end) {
      Vec x[(kRows + 1) / 2];
      for (int i = 0; i < kRows; i += 2) {
        const int odd = i + 1 < kRows ? i + 1 : i;
        x[i / 2] = low_halves(load(&rows[i / 3][i % 3 * a.row], 2),
                              load(&rows[odd / 3][odd % 3 * a.row], 2));
      }
      for (int j = 0; j < kPanels; ++j) matrices[j].add_pair(x, b + j * panel + k * kPanel);
      for (int i = 0; i < kPointers; ++i) rows[i] += 2;
      k += 2;
    }
#pragma GCC unroll 4
    for (int j = 0; j < kPanels; ++j) {
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        total[j][i][0] = matrices[j].of_row(i, 0);
        if constexpr (!kHalf) total[j][i][1] = matrices[j].of_row(i, 1);
      }
    }
  }
#endif
#if defined(FASTBERT_LEVEL_NEON)
  // Four elements of each row of the left operand are loaded at once.
  for (; !kInMatrices<Format> && k + kLanes <= end; k += kLanes) {
    lines.fetch();
    lines.fetch();
    for (int i = 0; i < 4; ++i) __builtin_prefetch(far + i * kCacheLine, 0, 2);
    far += kLanes * next.step;
    Vec x[kRows];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) x[i] = load(&rows[i / 3][i % 3 * a.row]);
    lane_step(x, k, Count<0>{});
    lane_step(x, k, Count<1>{});
    lane_step(x, k, Count<2>{});
    lane_step(x, k, Count<3>{});
#pragma GCC unroll 8
    for (int i = 0; i < kPointers; ++i) rows[i] += kLanes;
  }
#endif
  for (; !kInMatrices<Format> && k + 2 <= end; k += 2) {
    lines.fetch();
    __builtin_prefetch(far, 0, 2);
    __builtin_prefetch(far + kCacheLine, 0, 2);
    far += 2 * next.step;
    step(k, 0);
    step(k, 1);
#pragma GCC unroll 8
    for (int i = 0; i < kPointers; ++i) {
      rows[i] += 2;
      asm("" : "+r"(rows[i]));  // Without this line, the compiler uses a single pointer.
    }
  }
  if (k < end) step(k, 0);
#pragma GCC unroll 4
  for (int j = 0; j < kPanels; ++j) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      float* row = sums + i * stride + j * kPanel;
      store(row, add ? load(row) + total[j][i][0] : total[j][i][0]);
      store(row + kLanes, add && !kHalf ? load(row + kLanes) + total[j][i][1] : total[j][i][1]);
    }
  }
}

// Returns the number of steps along k that are added in one chain. Long chains of additions lose
// accuracy. Other libraries compute a product of one or two rows with a separate sum in each lane,
// which is twice as accurate as one chain over a whole block. Chunks of 128 steps hardly slow down
// large products. Chunks of 32 steps are used for products whose speed matters little: products
// with k < 128, or with so few columns (n < 16) that other libraries would use a sum in each lane.
FASTBERT_INLINE int64_t chunk_of(int64_t n, int64_t k) { return k < 128 || n < 16 ? 32 : 128; }

template <class Format, int kRows, int kPanels, bool kHalf = false>
FASTBERT_INLINE void multiply(const LeftWords& a, const typename Format::Storage* b, int64_t panel,
                              const Depth& depth, float* sums, int64_t stride, Next next) {
  int64_t begin = 0;
  do {
    const int64_t end = begin + depth.chunk < depth.steps ? begin + depth.chunk : depth.steps;
    multiply_chunk<Format, kRows, kPanels, kHalf>(a, b, panel, begin, end, sums, stride,
                                                  depth.add || begin > 0, next);
    begin = end;
  } while (begin < depth.steps);
}

template <class Format, int kRows, bool kHalf>
FASTBERT_INLINE void multiply_at_most(int rows, const LeftWords& a,
                                      const typename Format::Storage* b, const Depth& depth,
                                      float* sums, int64_t stride, Next next) {
  if (rows == kRows) {
    multiply<Format, kRows, 1, kHalf>(a, b, 0, depth, sums, stride, next);
  } else if constexpr (kRows > 1) {
    multiply_at_most<Format, kRows - 1, kHalf>(rows, a, b, depth, sums, stride, next);
  }
}

// The function is not inlined, so that the code for each number of rows exists once per format.
template <class Format, bool kHalf = false>
__attribute__((noinline)) void multiply_rows(int rows, const LeftWords& a,
                                             const typename Format::Storage* b, const Depth& depth,
                                             float* sums, int64_t stride, Next next) {
  constexpr int kMost = kHalf ? kHalfTileRows : kTileRows;
  multiply_at_most<Format, kMost, kHalf>(rows, a, b, depth, sums, stride, next);
}

// Computes a task's product for one block of k, and adds it to the sums. After the last block of k,
// the epilogue of each tile also runs.
template <class Format>
struct TaskBlock {
  using Storage = typename Format::Storage;

  const Gemm& g;
  const Task& task;
  int64_t words, first, depth;  // words in a row; first word and word count of this block

  FASTBERT_INLINE const Storage* panel(int64_t n) const {
    return (const Storage*)g.packed + (task.column + n) * words + first * kPanel;
  }
  FASTBERT_INLINE bool last() const { return first + depth >= words; }
  FASTBERT_INLINE Depth steps() const { return {depth, chunk_of(g.n, g.k), first > 0}; }

  FASTBERT_INLINE float* sums(int64_t row, int64_t n) const {
    return task.one_by_one ? task.sums : task.sums + row * task.stride + n;
  }

  FASTBERT_INLINE void finish(int64_t row, int64_t n, int rows, int64_t columns) const {
    finish_tile(g,
                {sums(row, n), task.stride, task.row + row, task.column + n, rows, (int)columns});
  }

  // Prefetches the lines that the epilogue of a tile reads and writes, before the tile is
  // multiplied. These lines are one row apart, so the processor does not prefetch them by itself.
  template <int kWrite>
  FASTBERT_INLINE void fetch_tile(const void* matrix, int64_t stride, fastbert::cpu::Format format,
                                  int64_t row, int64_t n, int rows) const {
    if (!matrix) return;
    const int64_t size = format == fastbert::cpu::Format::f32 ? 4 : 2;
    const char* p = (const char*)matrix + ((task.row + row) * stride + task.column + n) * size;
    for (int i = 0; i < rows; ++i, p += stride * size) {
      for (int64_t j = 0; j < kPanel * size; j += kCacheLine) __builtin_prefetch(p + j, kWrite, 3);
    }
  }

  FASTBERT_INLINE void fetch_tile(int64_t row, int64_t n, int rows) const {
    fetch_tile<0>(g.residual.data, g.residual.stride, g.residual_format, row, n, rows);
    fetch_tile<1>(g.pre_activation, g.out_row, g.pre_activation_format, row, n, rows);
    fetch_tile<1>(g.out, g.out_row, g.out_format, row, n, rows);
  }

  // Multiplies all rows of the task by the panel `b`. The rows are spread evenly over tiles. Tiles
  // of five rows keep the processor's multipliers as busy as tiles of six, but a last tile of a
  // single row would not.
  template <class Operand>
  FASTBERT_INLINE void multiply_panel(int64_t n, const typename Operand::Storage* b,
                                      const char* next_panel) const {
    const int64_t tiles = (task.rows + kTileRows - 1) / kTileRows;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t row = task.rows * tile / tiles, end = task.rows * (tile + 1) / tiles;
      const int rows = (int)(end - row);
      const Next next =
          next_of((const char*)(task.a + (tile + 1 < tiles ? end : 0) * kDepth), 4 * kDepth,
                  next_panel, depth * kPanel * sizeof(Storage), depth, tile, tiles);
      if (last()) fetch_tile(row, n, rows);
      multiply_rows<Operand>(rows, {task.a + row * kDepth, kDepth}, b, steps(), sums(row, n),
                             task.stride, next);
      if (last()) finish(row, n, rows, task.columns - n < kPanel ? task.columns - n : kPanel);
    }
  }

  // Multiplies the kRows rows of a task by kPanels panels at a time, so that there are enough
  // independent sums to hide the latency of the instructions. Returns the first column that is not
  // yet computed.
  template <int kRows, int kPanels>
  FASTBERT_INLINE int64_t multiply_panels() const {
    int64_t n = 0;
    for (; n + kPanels * kPanel <= task.columns; n += kPanels * kPanel) {
      const Next next =
          next_of((const char*)task.a, 4 * kDepth, (const char*)panel(n + kPanels * kPanel),
                  kPanels * depth * kPanel * sizeof(Storage), depth, 0, 1);
      multiply<Format, kRows, kPanels>({task.a, kDepth}, panel(n), kPanel * words, steps(),
                                       sums(0, n), task.stride, next);
      if (last()) finish(0, n, kRows, kPanels * kPanel);
    }
    return n;
  }

  // Returns the address of a row of the left operand at the start of this block of k.
  FASTBERT_INLINE const char* left(int64_t row) const {
    const int64_t size = g.format == fastbert::cpu::Format::f32 ? 4 : 2;
    const int64_t k = kIsDots<Format> ? 2 * first : first;
    return (const char*)g.a + ((task.row + row) * g.a_row + k * g.a_column) * size;
  }

  // Computes the block of k in a turned product. A panel of x stays in the first-level cache while
  // all rows of W in the task are multiplied by the panel. Each tile of rows prefetches the rows of
  // the next tile. Rows that are not stored as words are copied before the product with the first
  // panel.
  FASTBERT_INLINE void run_turned() const {
    const LeftWords stored = {(const float*)left(0), (left(1) - left(0)) / 4};
    const bool in_place = is_in_place<Format>(g);
    const LeftWords w = in_place ? stored : LeftWords{task.a, kDepth};
    // If the task has a single panel, the copied rows of a tile are not needed again, and the next
    // tile overwrites the copy.
    const bool keeps = in_place || task.columns > kPanel;
    for (int64_t n = 0; n < task.columns; n += kPanel) {
      const bool half = task.columns - n <= kLanes;
      const int64_t tiles = quotient_up(task.rows, half ? kHalfTileRows : kTileRows);
      const auto first_row = [&](int64_t tile) { return task.rows * tile / tiles; };
      const auto* next_panel = (const char*)panel(n + kPanel < task.columns ? n + kPanel : 0);
      const bool copies = n == 0 && !in_place;
      int64_t finished = 0;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t row = first_row(tile), end = first_row(tile + 1);
        const float* words = w.words + (keeps ? row * w.row : 0);
        if (copies) {
          const LeftPlace next = {task.row + (end < task.rows ? end : 0),
                                  first + (end < task.rows || last() ? 0 : depth)};
          pack_left_words<Format>(g, task.row + row, end - row, first, depth, (float*)words, next);
        }
        // The copy of pairs prefetches the next rows itself.
        const bool fetched = copies && kIsDots<Format>;
        const LeftWords& far = copies && !fetched ? stored : w;
        const int64_t next_words = fetched           ? words - w.words
                                   : end < task.rows ? end * far.row
                                                     : after_task(far, n);
        const Next next = next_of((const char*)(far.words + next_words), 4 * far.row, next_panel,
                                  depth * kPanel * sizeof(Storage), depth, tile, tiles);
        const bool finishes = last() && (end / kPanel > finished / kPanel || end == task.rows);
        if (finishes) fetch_outputs(finished, n);
        const auto multiply = half ? &multiply_rows<Format, true> : &multiply_rows<Format>;
        multiply((int)(end - row), {words, w.row}, panel(n), steps(), sums(row, n), task.stride,
                 next);
        if (!finishes) continue;
        while (finished + kPanel <= end || (end == task.rows && finished < end)) {
          finish_outputs(finished, n);
          finished += kPanel;
        }
      }
    }
  }

  // Returns the distance in words from the first row of the task to the data that the last tile
  // prefetches. If another panel follows, these data are the first row again. Otherwise, they are
  // the next block of k of the first row or, after the last block of k, the first row after the
  // task.
  FASTBERT_INLINE int64_t after_task(const LeftWords& w, int64_t n) const {
    if (n + kPanel < task.columns) return 0;
    return last() ? task.rows * w.row - first : depth;
  }

  // Prefetches the cache lines that hold up to kPanel outputs of each row of x in a panel.
  FASTBERT_INLINE void fetch_outputs(int64_t output, int64_t n) const {
    const int rows = clamp_count(task.columns - n, kPanel);
    const int64_t row = task.column + n - task.row, column = task.row + output - task.column;
    fetch_tile(row, column, rows);
  }

  // Runs the epilogue for up to kPanel rows of sums of a panel of x. Each row of sums is a column
  // of the result.
  FASTBERT_INLINE void finish_outputs(int64_t row, int64_t n) const {
    const Tile tile = {sums(row, n),
                       task.stride,
                       task.row + row,
                       task.column + n,
                       clamp_count(task.rows - row, kPanel),
                       clamp_count(task.columns - n, kPanel)};
    g.next ? finish_packed(g, tile) : finish_turned(g, tile);
  }

  FASTBERT_INLINE void run() const {
    // With three or more tiles of rows, converting a panel to fp32 once, in memory, takes less time
    // than converting the panel for every tile.
    const bool widen = sizeof(Storage) < 4 && task.rows > 2 * kTileRows;
    int64_t n = task.rows == 1   ? multiply_panels<1, kMostPanels>()
                : task.rows == 2 ? multiply_panels<2, 2>()
                                 : 0;
    for (; n < task.columns; n += kPanel) {
      const Storage* b = panel(n);
      const char* next = (const char*)(n + kPanel < task.columns ? panel(n + kPanel)
                                       : last()                  ? b
                                                                 : panel(0) + depth * kPanel);
      if (!widen) {
        multiply_panel<Format>(n, b, next);
        continue;
      }
      for (int64_t k = 0; k < depth; ++k) {
        Vec low, high;
        PanelRow<Format>::load(b + k * kPanel, low, high);
        PanelRow<F32>::store(task.panel + k * kPanel, low, high);
      }
      multiply_panel<F32>(n, task.panel, next);
    }
  }
};

}  // namespace fastbert::cpu::FASTBERT_LEVEL
