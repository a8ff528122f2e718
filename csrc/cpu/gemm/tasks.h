// The division of the result of a product into tasks. Threads take the tasks as they become free.
//
// The last blocks of rows are short, because threads do not run equally fast. A thread that begins
// a long task when the other threads are nearly done would make them wait.

#pragma once

#include "../isa/kernels.h"
#include "../isa/vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

struct GemmBlock {
  int64_t row, column, rows, columns;
};

FASTBERT_INLINE int64_t left_rows(const Gemm& g) { return g.turned ? g.n : g.m; }
FASTBERT_INLINE int64_t right_rows(const Gemm& g) { return g.turned ? g.m : g.n; }

FASTBERT_INLINE int64_t quotient_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Divides the result into long and short tasks. A long task has `rows` rows and `columns` columns.
// The number of rows of a short task is a multiple of `unit` and at least `least`. With one thread,
// with fewer blocks of rows than threads, or if no such number is possible, all tasks are long.
inline GemmPlan divided(const Gemm& g, int64_t rows, int64_t columns, int threads, int64_t unit,
                        int64_t least) {
  constexpr int64_t kShortTasks = 3;  // short tasks per thread
  const int64_t blocks = quotient_up(left_rows(g), rows);
  GemmPlan plan = {0, 0, rows, columns, blocks, rows};
  if (threads > 1 && blocks >= threads) {
    const int64_t last = left_rows(g) - (blocks - threads) * rows;
    const int64_t few = quotient_up(quotient_up(last, kShortTasks * threads), unit) * unit;
    if (few >= least && few < rows) plan.long_blocks = blocks - threads, plan.short_rows = few;
  }
  const int64_t rest = left_rows(g) - plan.long_blocks * rows;
  const int64_t short_blocks = rest > 0 ? quotient_up(rest, plan.short_rows) : 0;
  plan.tasks = (plan.long_blocks + short_blocks) * quotient_up(right_rows(g), columns);
  return plan;
}

FASTBERT_INLINE GemmBlock block_of(const Gemm& g, const GemmPlan& plan, int64_t task) {
  const int64_t across = quotient_up(right_rows(g), plan.columns), block = task / across;
  const bool is_long = block < plan.long_blocks;
  const int64_t row =
      is_long ? block * plan.rows
              : plan.long_blocks * plan.rows + (block - plan.long_blocks) * plan.short_rows;
  const int64_t column = task % across * plan.columns;
  const int64_t rows = is_long ? plan.rows : plan.short_rows;
  const int64_t rows_left = left_rows(g) - row, columns_left = right_rows(g) - column;
  return {row, column, rows_left < rows ? rows_left : rows,
          columns_left < plan.columns ? columns_left : plan.columns};
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
