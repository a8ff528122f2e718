// The conversion of tensors to the operands of the attention kernels (pointers, strides and sizes),
// and the division of the work into pieces of similar cost.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "../isa/dispatch.h"
#include "../operands.h"

namespace fastbert::cpu {

// The arguments that every attention operator takes.
struct AttentionArguments {
  const OptionalTensor &mask, &bias, &cu_seqlens_q, &cu_seqlens_k, &seed;
  int64_t max_seqlen_q, max_seqlen_k;
  double dropout_p, scale;
  int64_t left, right;
};

// Checks the cumulative sequence lengths `cu_seqlens` and returns a private copy of them. The
// kernels use the numbers of the copy as indices, and no other thread can change the copy. It is an
// error if the last number is larger than `rows`, the number of rows of the packed tensor, or if a
// sequence is longer than `longest`. Error messages call the arguments `name` and `longest_name`.
at::Tensor checked_lengths(const char* name, const at::Tensor& cu_seqlens, int64_t rows,
                           const char* longest_name, int64_t longest);

// Checks that the strides of `written`, a tensor that an operator writes to, do not place two
// elements at the same address.
void check_no_overlap(const char* name, const at::Tensor& written);

// The checked inputs of one call of an attention operator: the operands of the kernels, and the
// tensors that own the memory of these operands.
struct AttentionProblem {
  Attention kernel;
  std::vector<at::Tensor> alive;
  int64_t q_rows, k_rows;  // rows of the tensors, including rows after the last packed sequence

  AttentionProblem(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const AttentionArguments& arguments);

  bool packed() const { return kernel.cu_q != nullptr; }
  int64_t q_length(int64_t sequence) const;
  int64_t k_length(int64_t sequence) const;
  // Returns the approximate number of (query, key) pairs that are inside the window, for one head
  // of the sequence.
  int64_t pairs(int64_t sequence) const;
  // `read` returns the operand for a tensor that the kernels read; a tensor whose last dimension is
  // not contiguous is copied first. `write` returns the operand for a tensor that the kernels
  // write; error messages call the tensor `name`.
  ConstRows read(const at::Tensor& x);
  Rows write(const char* name, const at::Tensor& x) const;
  // Returns an empty tensor with the shape and dtype of q, k or v. The heads of a token are one
  // after another in memory.
  at::Tensor empty_result(const at::Tensor& like) const;
  // Returns an empty fp32 tensor with one element for each query, such as the log-sum-exp.
  at::Tensor empty_statistic(const at::Tensor& like) const;
};

// Computes attention. Rows of `out` after the last packed sequence are set to 0.
void forward_into(AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse);

// Sets the rows of the gradients after the last packed sequence to 0.
void zero_slack(const AttentionProblem& problem, const at::Tensor& dq, const at::Tensor& dk,
                const at::Tensor& dv);

// Returns the softmax weights of the heads in `heads` and the queries in `rows`, where None stands
// for all of them, in the dtype of q and the shape (B, heads, rows, max_k).
at::Tensor weights_of(const AttentionProblem& problem, const at::Tensor& q,
                      at::OptionalIntArrayRef heads, at::OptionalIntArrayRef rows);

// Views of rows (T, n H D), in which `n` parts with H heads each follow one another.
struct HeadsOfRows {
  int64_t heads, head_dim, batch, max_seqlen;
  bool packed;

  // Returns a part of the rows, (T, H, D) if the sequences are packed and (batch, H, max_seqlen, D)
  // otherwise.
  at::Tensor part(const at::Tensor& rows, int64_t number) const;
};

struct Work {
  AttentionItem item;
  int64_t cost;  // approximate number of multiplications
};

// Calls body(item, memory) once for each item, on torch's threads. The items are sorted so that the
// most expensive items come first, and no thread begins a long item when the other threads are
// done. `memory` points to `scratch` bytes that belong to the calling thread.
template <class Item, class Body>
void share_out(std::vector<Item>& items, int64_t scratch, const Body& body) {
  if (items.empty()) return;
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return a.cost > b.cost; });
  int64_t total = 0;
  for (const Item& item : items) total += item.cost;
  // Waking a thread takes longer than this many multiplications, so no thread is woken for fewer
  // multiplications.
  constexpr int64_t kWorthAThread = 1 << 18;
  const int64_t threads = std::min({(int64_t)at::get_num_threads(), (int64_t)items.size(),
                                    std::max<int64_t>(1, total / worth_a_thread(kWorthAThread))});
  for_each_task((int64_t)items.size(), threads,
                [&](int64_t i) { body(items[i], thread_scratch(scratch)); });
}

// Divides the rows of every head of every sequence into pieces, where length(sequence) is the
// number of rows. A piece is a whole head if there are enough heads for all threads and the head
// has at most `longest` rows. Otherwise, the pieces are shorter. The length of a piece is a
// multiple of `grain`, except for the last piece of a head.
template <class Length>
std::vector<Work> pieces(const AttentionProblem& problem, int64_t grain, int64_t longest,
                         const Length& length) {
  const Attention& a = problem.kernel;
  const auto cost = [&](int64_t sequence) { return problem.pairs(sequence) * a.head_dim; };
  int64_t total = 0;
  for (int64_t b = 0; b < a.batch; ++b) total += cost(b) * a.heads;
  const int64_t fair = std::max<int64_t>(total / (4 * at::get_num_threads()), 1);
  std::vector<Work> items;
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t rows = length(b);
    if (rows == 0) continue;
    const int64_t count = std::max((cost(b) + fair - 1) / fair, (rows + longest - 1) / longest);
    const int64_t piece =
        ((rows + count - 1) / std::max<int64_t>(count, 1) + grain - 1) / grain * grain;
    for (int64_t h = 0; h < a.heads; ++h) {
      for (int64_t begin = 0; begin < rows; begin += piece) {
        const int64_t end = std::min(rows, begin + piece);
        items.push_back({{b, h, begin, end}, cost(b) * (end - begin) / rows + 1});
      }
    }
  }
  return items;
}

}  // namespace fastbert::cpu
