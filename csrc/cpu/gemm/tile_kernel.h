// bf16 products on AMX tiles. The epilogues are those of kernel.h. The functions at the end of this
// file replace functions of kernel.h in the kernel table.
//
// The right operand is packed in panels of 32 columns. A panel is a sequence of steps of 32
// elements along k, the dimension that a product sums over. A step consists of two tiles of 16
// columns, in which each word holds two consecutive elements along k. The 2 KiB of a step are read
// in sequence. The rows of the left operand are read without a copy if they are aligned, and
// otherwise from a padded copy.
//
// The four products of a step take 64 cycles (Intel's Optimization Reference Manual). They update 2
// x 2 tiles of sums from two tiles of the left operand and two tiles of the right operand, so each
// tile is loaded once. Loading these 4 KiB from the second-level cache would take twice as long as
// the products. One operand, 32 rows or columns (48 KiB at k = 768), therefore stays in the
// first-level cache, while the other operand is streamed from the second-level cache. A hint in the
// streaming loads keeps them from evicting the first operand, which makes products 1.5 x as fast on
// a Xeon with AMX. The data of the next pass are meanwhile prefetched from beyond these caches. If
// the left operand is a weight, a strip of its rows stays in the first-level cache, and panels of x
// are streamed. Otherwise, a panel of the weight stays, and rows of x are streamed; with 16 rows of
// x or fewer, a step updates 1 x 4 tiles of sums from two panels.
//
// k is never divided: sums stay in tiles from the first step to the last step. An element of the
// result is the sum of its steps in order, for every number of rows, every number of threads and
// every position of the row in the batch. No partial sum is stored.
//
// The epilogue of a block runs between the steps of the next block (pieces.h).

#pragma once

#include "../isa/tile.h"
#include "kernel.h"
#include "pieces.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

constexpr int64_t kBlockBytes = 1152 << 10;  // most bytes of a streamed operand
constexpr int64_t kMaxStripRows = 1024;      // most rows of a task

// Copies rows of the left operand one after another. Zeros pad each row to whole steps, and the
// number of rows to whole tiles.
template <class From>
void pack_left(const Gemm& g, int64_t first, int64_t rows, char* out) {
  const int64_t steps = steps_of(g.k), stride = steps * kStepBytes;
  const auto* a = (const typename From::Storage*)g.a + first * g.a_row;
  for (int64_t row = 0; row < rows; row += kLanes) {
    const int count = clamp_count(rows - row, kLanes);
    for (int64_t step = 0; step < steps; ++step) {
      const int depth = clamp_count(g.k - step * kStep, kStep);
      const auto* p = a + row * g.a_row + step * kStep * g.a_column;
      char* block = out + row * stride + step * kStepBytes;
      Vec words[kLanes];
      load_row_pairs<From>(p, g.a_row, g.a_column, count, depth, words);
      for (int i = 0; i < kLanes; ++i) store((float*)(block + i * stride), words[i]);
    }
  }
}

inline void pack_left(const Gemm& g, int64_t first, int64_t rows, char* out) {
  with_format(g.format, [&](auto type) { pack_left<decltype(type)>(g, first, rows, out); });
}

// Configures all eight tiles with their full size. Smaller operands are padded.
FASTBERT_INLINE void configure_tiles() {
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) shapes.set(i, kMostTileRows, kMostTileBytes);
  tile_configure(shapes);
}

// Returns whether tiles of the left operand can be loaded without a copy. This is possible if the
// rows consist of whole steps, and each step of a row is one cache line.
FASTBERT_INLINE bool lies_in_tiles(const Gemm& g) {
  return g.format == Format::bf16 && g.a_column == 1 && g.k % kStep == 0 && g.a_row % kStep == 0 &&
         (uintptr_t)g.a % 64 == 0;
}

// The operand that is streamed while the other operand stays in the first-level cache. Tiles of the
// streamed operand are loaded with the hint that they will not be loaded again soon, so that they
// do not evict the other operand, which may fill this cache.
enum class Passing { none, left, right };

template <int kTile, bool kPasses>
FASTBERT_INLINE void load_operand(const void* p, int64_t stride) {
  kPasses ? tile_stream<kTile>(p, stride) : tile_load<kTile>(p, stride);
}

// Adds one step to a block of kRowTiles x 2 kPanels tiles of sums. Tiles 0 to 3 are the sums, one
// row of tiles after another; tiles 4 to 7 are operands.
template <int kRowTiles, int kPanels, Passing kPassing>
FASTBERT_INLINE void multiply_step(const char* a, int64_t stride, const char* b, int64_t panel) {
  constexpr bool kLeft = kPassing == Passing::left, kRight = kPassing == Passing::right;
  load_operand<4, kLeft>(a, stride);
  load_operand<6, kRight>(b, kStepBytes);
  tile_product_bf16<0, 4, 6>();
  load_operand<7, kRight>(b + kWeightTile, kStepBytes);
  tile_product_bf16<1, 4, 7>();
  if constexpr (kRowTiles == 2) {
    load_operand<5, kLeft>(a + kMostTileRows * stride, stride);
    tile_product_bf16<2, 5, 6>();
    tile_product_bf16<3, 5, 7>();
  }
  if constexpr (kPanels == 2) {
    load_operand<5, kRight>(b + panel, kStepBytes);
    tile_product_bf16<2, 4, 5>();
    load_operand<6, kRight>(b + panel + kWeightTile, kStepBytes);
    tile_product_bf16<3, 4, 6>();
  }
}

template <int kRowTiles, int kPanels>
FASTBERT_INLINE void store_block(float* sums, int64_t stride) {
  tile_store<0>(sums, 4 * stride);
  tile_store<1>(sums + kLanes, 4 * stride);
  if constexpr (kRowTiles * kPanels == 2) {
    float* next = kRowTiles == 2 ? sums + kMostTileRows * stride : sums + kPanel;
    tile_store<2>(next, 4 * stride);
    tile_store<3>(next + kLanes, 4 * stride);
  }
}

// The next data to prefetch from beyond the second-level cache. Each step prefetches the next
// `lines` cache lines of the right operand, which begin at `b`. It also prefetches the next cache
// line of each of `a_rows` rows of the left operand, of which the first row begins at `a`. `a` is
// null if no rows are to be prefetched.
struct Ahead {
  const char* b;
  int64_t lines;
  const char* a;
  int a_rows = kStrip;
};

FASTBERT_INLINE void fetch(const char* p) { __builtin_prefetch(p, 0, 2); }

// Prefetches the kRows rows of a step of the left operand into the first-level cache.
template <int kRows>
FASTBERT_INLINE void fetch_near(const char* a, int64_t stride) {
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) __builtin_prefetch(a + i * stride, 0, 3);
}

// One task: `rows` rows and `columns` columns of the result, starting at (row, column).
struct TileTask {
  const Gemm& g;
  int64_t row, column, rows, columns, steps;
  // The rows of the left operand, and a padded copy of the last rows. The copy is null if `a`
  // itself is a copy.
  const char *a, *tail;
  int64_t a_stride;  // bytes between rows of `a`
  float* sums;       // sums of one block
  Pieces pending;    // epilogue of the previous block
};

template <int kRowTiles, int kPanels, Passing kPassing>
__attribute__((noinline)) void multiply_block(TileTask& t, int64_t strip, int64_t panel,
                                              const Ahead& ahead) {
  const int64_t steps = t.steps, panel_bytes = steps * kPanelStep;
  const bool whole = (strip + 1) * kStrip <= t.rows;
  const char* a = whole || !t.tail ? t.a + strip * kStrip * t.a_stride : t.tail;
  const int64_t a_stride = whole || !t.tail ? t.a_stride : steps * kStepBytes;
  const char* b = (const char*)t.g.packed + (t.column / kPanel + panel) * panel_bytes;
  const Pieces pending = t.pending;
  int64_t due = 0;
  int done = 0;
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  constexpr int64_t kNearSteps = 2;
  [[maybe_unused]] const int64_t near =
      tile_schedule == TileSchedule::fetched ? steps - kNearSteps : 0;
  for (int64_t step = 0; step < steps; ++step) {
    multiply_step<kRowTiles, kPanels, kPassing>(a + step * kStepBytes, a_stride,
                                                b + step * kPanelStep, panel_bytes);
    for (due += pending.count; due >= steps; due -= steps) {
      pending.piece(t.g, pending.tile, done++);
    }
    if constexpr (kPanels == 1) {
      if (step < near) {
        fetch_near<kRowTiles * kMostTileRows>(a + (step + kNearSteps) * kStepBytes, a_stride);
      }
    }
    for (int64_t i = 0; i < ahead.lines; ++i) {
      fetch(ahead.b + (step * ahead.lines + i) * kStepBytes);
    }
    if (ahead.a) {
      for (int i = 0; i < ahead.a_rows; ++i) fetch(ahead.a + i * a_stride + step * kStepBytes);
    }
  }
  const int64_t row = strip * kStrip, column = panel * kPanel;
  constexpr int64_t stride = kPanels * kPanel;
  store_block<kRowTiles, kPanels>(t.sums, stride);
  const Tile tile = {t.sums,
                     stride,
                     t.row + row,
                     t.column + column,
                     clamp_count(t.rows - row, kRowTiles * kMostTileRows),
                     clamp_count(t.columns - column, kPanels * kPanel)};
  t.pending = t.g.turned ? turned_pieces(t.g, tile) : row_pieces(tile);
}

FASTBERT_INLINE void finish_pending(const TileTask& t) {
  for (int i = 0; i < t.pending.count; ++i) t.pending.piece(t.g, t.pending.tile, i);
}

// Multiplies each panel by all strips of rows of the task, one panel after another.
FASTBERT_INLINE void multiply_blocks(TileTask& t) {
  constexpr auto kPassing = Passing::left;
  const int64_t panels = panels_of(t.columns), strips = (t.rows + kStrip - 1) / kStrip;
  const int64_t panel_bytes = t.steps * kPanelStep;
  const int64_t width = t.rows <= kMostTileRows ? 2 : 1;
  const char* b = (const char*)t.g.packed + t.column / kPanel * panel_bytes;
  for (int64_t panel = 0; panel < panels; panel += width) {
    const bool last = panel + width >= panels;
    for (int64_t strip = 0; strip < strips; ++strip) {
      const int64_t rows = t.rows - strip * kStrip;
      const int64_t lines = last ? 0 : (width * kPanelStep / kStepBytes + strips - 1) / strips;
      const char* next = b + (panel + width) * panel_bytes + strip * t.steps * lines * kStepBytes;
      const bool first_pass = panel == 0 && rows >= 2 * kStrip;
      const Ahead ahead = {next, lines,
                           first_pass ? t.a + (strip + 1) * kStrip * t.a_stride : nullptr};
      if (rows > kMostTileRows) {
        multiply_block<2, 1, kPassing>(t, strip, panel, ahead);
      } else if (width == 2 && panel + 1 < panels) {
        multiply_block<1, 2, kPassing>(t, strip, panel, ahead);
      } else {
        multiply_block<1, 1, kPassing>(t, strip, panel, ahead);
      }
    }
  }
  finish_pending(t);
}

// Multiplies each strip of W by all panels of x, while the next strip is prefetched. A single panel
// is not streamed (Passing::none): the panel and W share the first-level cache, and a hint for
// either of them was not faster.
template <Passing kPassing>
FASTBERT_INLINE void multiply_turned(TileTask& t) {
  const int64_t panels = panels_of(t.columns), strips = (t.rows + kStrip - 1) / kStrip;
  for (int64_t strip = 0; strip < strips; ++strip) {
    const int64_t rows = t.rows - strip * kStrip;
    const char* next = t.a + (strip + 1) * kStrip * t.a_stride;
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t begin = kStrip * panel / panels, end = kStrip * (panel + 1) / panels;
      Ahead ahead = {nullptr, 0, rows >= 2 * kStrip ? next + begin * t.a_stride : nullptr,
                     (int)(end - begin)};
      if (rows > kMostTileRows) {
        multiply_block<2, 1, kPassing>(t, strip, panel, ahead);
      } else {
        multiply_block<1, 1, kPassing>(t, strip, panel, ahead);
      }
    }
  }
  finish_pending(t);
}

// Returns the size in bytes of the copied rows of the left operand. The copy is the first part of
// the scratch memory of a task, and the sums follow it.
FASTBERT_INLINE int64_t left_bytes(const Gemm& g, int64_t rows) {
  return (lies_in_tiles(g) ? kStrip : whole_strips(rows)) * steps_of(g.k) * kStepBytes;
}

constexpr int64_t kSumsBytes = 4 * 2 * kStrip * kPanel;

inline void run_tile_task(const Gemm& g, int64_t row, int64_t column, int64_t rows, int64_t columns,
                          char* scratch) {
  const int64_t steps = steps_of(g.k), tail = rows % kStrip;
  float* sums = (float*)(scratch + left_bytes(g, rows));
  TileTask t = {g,    row, column, rows, columns, steps, scratch, nullptr, steps * kStepBytes,
                sums, {}};
  if (!lies_in_tiles(g)) {
    pack_left(g, row, rows, scratch);
  } else {
    t.a = (const char*)g.a + 2 * row * g.a_row;
    t.a_stride = 2 * g.a_row;
    t.tail = scratch;
    if (tail) pack_left(g, row + rows - tail, tail, scratch);
  }
  configure_tiles();
  if (!g.turned) {
    multiply_blocks(t);
  } else if (columns > kPanel) {
    multiply_turned<Passing::right>(t);
  } else {
    multiply_turned<Passing::none>(t);
  }
  tile_release();
}

// Returns the division of a turned product into tasks. With one thread, a single task takes all
// rows of W if they need no copy, so that every strip but the first is prefetched.
inline GemmPlan turned_tile_plan(const Gemm& g, int threads) {
  const int64_t row_bytes = steps_of(g.k) * kStepBytes;
  const int64_t strips = quotient_up(g.n, kStrip);
  const int64_t fitting = kBlockBytes / (row_bytes + 1) / kPanel * kPanel;
  const int64_t most = fitting < kPanel ? kPanel : fitting;
  const int64_t parts = quotient_up(g.m, most);
  GemmPlan plan = {};
  plan.columns = quotient_up(quotient_up(g.m, parts), kPanel) * kPanel;
  const int64_t across = quotient_up(g.m, plan.columns);
  const int64_t wanted = threads == 1 ? 1 : quotient_up(kTasksOfThread * threads, across);
  // If rows have to be copied, the copy must leave room for x in the cache.
  const int64_t copied = kBlockBytes / 2 / (kStrip * (row_bytes + 1)) + 1;
  const int64_t least = lies_in_tiles(g) ? 1 : quotient_up(strips, copied);
  const int64_t blocks = wanted < least ? least : wanted;
  plan.rows = quotient_up(strips, blocks) * kStrip;
  plan.short_rows = plan.rows;
  plan.long_blocks = quotient_up(g.n, plan.rows);
  plan.tasks = plan.long_blocks * across;
  plan.scratch = left_bytes(g, plan.rows) + kSumsBytes;
  return plan;
}

// Returns the division of a product into tasks with the smallest estimated time on the busiest
// thread. The estimate counts the products, and the rows and columns that each task reads from
// beyond the second-level cache. Half of these reads are assumed to overlap with products.
inline GemmPlan tile_plan(const Gemm& g, int threads) {
  if (g.turned) return turned_tile_plan(g, threads);
  const int64_t steps = steps_of(g.k), row_bytes = steps * kStepBytes;
  const int64_t left = left_rows(g), right = right_rows(g);
  const int64_t strips = (left + kStrip - 1) / kStrip, panels = panels_of(right);
  const int64_t fitting = kBlockBytes / (row_bytes + 1) / kStrip;
  const int64_t most = fitting < 1                        ? 1
                       : fitting > kMaxStripRows / kStrip ? kMaxStripRows / kStrip
                                                          : fitting;
  const int64_t least_tasks = (strips + most - 1) / most;
  const int64_t most_tasks = least_tasks + threads < strips ? least_tasks + threads : strips;
  int64_t best_rows = 0, best_columns = 0;
  double best_cost = 0.0;
  for (int64_t r = least_tasks; r <= most_tasks; ++r) {
    for (int64_t wave = 1; wave <= 3; ++wave) {
      int64_t c = (wave * threads + r - 1) / r;
      c = c > panels ? panels : c;
      const int64_t task_strips = (strips + r - 1) / r, task_panels = (panels + c - 1) / c;
      const int64_t rows = task_strips * kStrip, columns = task_panels * kPanel;
      const int64_t tasks = ((left + rows - 1) / rows) * ((right + columns - 1) / columns);
      constexpr double kStepCycles = 64.0, kCyclesPerByte = 1.0 / 32.0, kTaskCycles = 2000.0;
      const double cost = (double)((tasks + threads - 1) / threads) *
                          ((double)(task_strips * task_panels * steps) * kStepCycles +
                           (double)((rows + columns) * row_bytes) * kCyclesPerByte + kTaskCycles);
      if (best_rows != 0 && cost >= best_cost) continue;
      best_cost = cost;
      best_rows = rows, best_columns = columns;
    }
  }
  GemmPlan plan = divided(g, best_rows, best_columns, threads, kStrip, 2 * kStrip);
  plan.scratch = left_bytes(g, best_rows) + kSumsBytes;
  return plan;
}

// The functions of the kernel table at a level with AMX tiles. They process bf16, and call the
// functions of kernel.h for other formats.

Format right_format_tiled(Format format) {
  return format == Format::bf16 ? Format::bf16 : right_format(format);
}

int64_t packed_bytes_tiled(Format to, int64_t n, int64_t k) {
  return to == Format::bf16 ? panels_of(n) * steps_of(k) * kPanelStep : packed_bytes(to, n, k);
}

void pack_tiled(const Packing& p, int64_t begin, int64_t end) {
  if (p.to != Format::bf16) return pack(p, begin, end);
  with_format(p.from, [&](auto from) {
    using From = decltype(from);
    for (int64_t panel = begin; panel < end; ++panel) {
      const auto* weight = (const typename From::Storage*)p.weight + panel * kPanel * p.row;
      pack_steps<From>(weight, p.row, p.column, p.n - panel * kPanel, p.k,
                       (char*)p.packed + panel * steps_of(p.k) * kPanelStep);
    }
  });
}

bool reads_rows_tiled(const Gemm& g, const Packing& x) {
  return g.packed_format != Format::bf16 && reads_rows(g, x);
}

GemmPlan gemm_plan_tiled(const Gemm& g, int threads) {
  return g.packed_format == Format::bf16 ? tile_plan(g, threads) : gemm_plan(g, threads);
}

void gemm_tiled(const Gemm& params, const GemmPlan& plan, int64_t begin, int64_t end,
                void* scratch) {
  if (params.packed_format != Format::bf16) return gemm(params, plan, begin, end, scratch);
  const Gemm g = params;
  for (int64_t i = begin; i < end; ++i) {
    const GemmBlock b = block_of(g, plan, i);
    run_tile_task(g, b.row, b.column, b.rows, b.columns, (char*)scratch);
  }
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
