// Matrix products with a packed right operand, and their epilogues: out = epilogue(x Wᵀ). There are
// two kinds of products. A plain product packs W in each call. A turned product packs x as its
// right operand, and reads the weight W as it is stored, without a copy. The text below describes
// plain products, in which W is packed. k is the dimension that a product sums over. In a turned
// product, W and x exchange roles, and blocks of sums are transposed before their epilogue.
//
// Panels, register tiles and blocks for each cache follow Goto and van de Geijn 2008.
//
// W is packed in panels that are two registers wide (packing.h). One step along k loads these two
// registers and multiplies them by one broadcast element of each of up to kTileRows rows of the
// left operand. The sums of such a tile stay in registers. k is divided into blocks of kDepth words
// of 32 bits. One block of a panel stays in or near the first-level cache while it is multiplied by
// all rows of a task. In fp32, the block has 16 KiB with registers of 32 bytes, and 32 KiB with
// registers of 64 bytes. The rows of the task are copied to 32-bit words with a constant stride,
// and stay in the second-level cache.
//
// In a turned product, the rows of W are multiplied by all panels of a task, which stay in the
// second-level cache. Rows that are stored as 32-bit words are read without a copy, unless so many
// rows would map to one set of the first-level cache that they evict each other.
//
// An element of the result is the sum of its chunks of k in order, and each chunk is the sum of its
// products in order. The order does not depend on the number of rows, on the division into tasks or
// on the row's position in its tile, so a row's result does not depend on its batch.

#pragma once

#include "few_rows.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

template <class Format>
void run_task(const Gemm& g, const Task& task, float* x) {
  if (has_few_rows<Format>(g) && task.rows >= kLanes) return run_few_rows<Format>(g, task, x);
  const int64_t words = words_of<Format>(g.k);
  // Half a panel fits the caches for every k, so rows of W are read from end to end.
  const bool whole = g.turned && task.columns <= kLanes && is_in_place<Format>(g);
  const int64_t most = whole ? words : kDepth;
  int64_t first = 0;
  do {
    const int64_t depth = words - first < most ? words - first : most;
    const TaskBlock<Format> block = {g, task, words, first, depth};
    if (g.turned) {
      block.run_turned();
    } else {
      pack_left_words<Format>(g, task.row, task.rows, first, depth, task.a,
                              {task.row, first + depth});
      block.run();
    }
    first += depth;
  } while (first < words);
}

// The number of tasks per thread that turned products on AMX tiles aim for with several threads
// (tile_kernel.h).
constexpr int64_t kTasksOfThread = 3;

// Returns the division of a turned product into tasks. Tasks have whole panels of outputs, so that
// each task writes whole cache lines.
inline GemmPlan turned_plan(const Gemm& g, int threads) {
  constexpr int64_t kMostRows = 256, kTaskRows = 16;  // kTaskRows: fixed cost of a task, in rows
  const int64_t parts = quotient_up(g.m, kMaxTurnedColumns);
  GemmPlan plan = {};
  plan.columns = quotient_up(quotient_up(g.m, parts), kPanel) * kPanel;
  int64_t best = 0;
  for (int64_t rows = kMostRows; rows >= kPanel; rows -= kPanel) {
    const int64_t tasks = quotient_up(g.n, rows) * parts;
    const int64_t cost = quotient_up(tasks, threads) * (rows + kTaskRows);
    if (best == 0 || cost < best) best = cost, plan.rows = rows;
  }
  plan.short_rows = plan.rows;
  plan.long_blocks = quotient_up(g.n, plan.rows);
  plan.tasks = plan.long_blocks * quotient_up(g.m, plan.columns);
  const int64_t sums = (plan.rows + kPanel) * sums_stride(plan.columns);
  plan.scratch = 4 * (kDepth * kPanel + plan.rows * kDepth + sums + few_rows_words(g));
  return plan;
}

// Returns the division into tasks with the smallest estimated time. The estimate counts the
// register multiplications of a task, the copying of its rows and the loading of its columns.
GemmPlan gemm_plan(const Gemm& g, int threads) {
  if (g.turned) return turned_plan(g, threads);
  const bool one_by_one = tiles_finish_one_by_one(g);
  const int64_t most_columns = one_by_one ? g.n : kMaxColumns;
  const int64_t panels = panels_of(g.n), most_panels = panels_of(most_columns);
  const int64_t least_columns = (panels + most_panels - 1) / most_panels;
  const int64_t least_rows = (g.m + kMaxRows - 1) / kMaxRows;
  int64_t best_rows = 0, best_columns = 0;
  double best_cost = 0.0;
  const int64_t most_column_tasks =
      least_columns + threads > panels ? panels : least_columns + threads;
  for (int64_t c = least_columns; c <= most_column_tasks; ++c) {
    for (int64_t wave = 1; wave <= 3; ++wave) {
      int64_t r = (wave * threads + c - 1) / c;
      r = r < least_rows ? least_rows : r > g.m ? g.m : r;
      const int64_t rows = (g.m + r - 1) / r, columns = (panels + c - 1) / c * kPanel;
      const int64_t tasks = ((g.m + rows - 1) / rows) * ((g.n + columns - 1) / columns);
      const double products = (double)(rows < 4 ? 4 : rows) * columns / kPanel;
      const double cost =
          (double)((tasks + threads - 1) / threads) * (products + 0.5 * rows + 0.5 * columns);
      if (best_rows != 0 && cost >= best_cost) continue;
      best_cost = cost;
      best_rows = rows, best_columns = columns;
    }
  }
  const int64_t sums = one_by_one ? kTileRows * sums_stride(kMostPanels * kPanel)
                                  : best_rows * sums_stride(best_columns);
  GemmPlan plan = divided(g, best_rows, best_columns, threads, 1, 2 * kTileRows);
  plan.scratch = 4 * (kDepth * kPanel + best_rows * kDepth + sums);
  return plan;
}

void gemm(const Gemm& params, const GemmPlan& plan, int64_t begin, int64_t end, void* scratch) {
  const Gemm g = params;
  const bool one_by_one = tiles_finish_one_by_one(g);
  float* x = (float*)((char*)scratch + plan.scratch) - few_rows_words(g);
  for (int64_t i = begin; i < end; ++i) {
    Task task = {block_of(g, plan, i)};
    task.one_by_one = one_by_one;
    task.stride = sums_stride(one_by_one ? kMostPanels * kPanel : task.columns);
    task.panel = (float*)scratch;
    task.a = task.panel + kDepth * kPanel;
    task.sums = task.a + plan.rows * kDepth;
    with_operand(g.packed_format, [&](auto type) { run_task<decltype(type)>(g, task, x); });
  }
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
