// Attention forward and the attention weights on the CPU. The operators check tensors, divide the
// work into items and distribute the items over threads.

#include <limits>
#include <numeric>
#include <tuple>

#include "../operators.h"
#include "operands.h"

namespace fastbert::cpu {
namespace {

// The largest number of queries in one item of work, chosen so that the queries stay in the cache.
constexpr int64_t kLongest = 4 * kAttentionQueries;

}  // namespace

void forward_into(AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse) {
  Attention& a = problem.kernel;
  a.out = problem.write("out", out);
  a.lse = lse.mutable_data_ptr<float>();
  if (problem.packed()) {
    const int64_t used = a.cu_q[a.batch], slack = problem.q_rows - used;
    out.narrow(0, used, slack).zero_();
    lse.narrow(1, used, slack).fill_(-std::numeric_limits<float>::infinity());
  }
  auto items = pieces(problem, kAttentionQueries, kLongest,
                      [&](int64_t sequence) { return problem.q_length(sequence); });
  int64_t longest = 1;
  for (const Work& work : items) longest = std::max(longest, work.item.end - work.item.begin);
  const Kernels& k = kernels();
  share_out(items, k.attention_scratch(a, longest),
            [&](const Work& work, void* memory) { k.attention_forward(a, work.item, memory); });
}

std::tuple<at::Tensor, at::Tensor> attention_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask,
    const OptionalTensor& bias, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, const OptionalTensor& seed, int64_t max_seqlen_q,
    int64_t max_seqlen_k, double dropout_p, double scale, int64_t left, int64_t right) {
  AttentionProblem problem(q, k, v,
                           {mask, bias, cu_seqlens_q, cu_seqlens_k, seed, max_seqlen_q,
                            max_seqlen_k, dropout_p, scale, left, right});
  auto out = problem.empty_result(q);
  auto lse = problem.empty_statistic(q);
  forward_into(problem, out, lse);
  return {out, lse};
}

at::Tensor attention_of_rows(const at::Tensor& qkv, int64_t heads, const OptionalTensor& mask,
                             const OptionalTensor& bias, const OptionalTensor& cu_seqlens,
                             int64_t batch, int64_t max_seqlen, double scale, int64_t left,
                             int64_t right) {
  const int64_t columns = qkv.size(1) / 3;
  auto out = empty({qkv.size(0), columns}, qkv.options());
  const HeadsOfRows of = {heads, columns / heads, batch, max_seqlen, cu_seqlens.has_value()};
  AttentionProblem problem(of.part(qkv, 0), of.part(qkv, 1), of.part(qkv, 2),
                           {mask, bias, cu_seqlens, cu_seqlens, std::nullopt, max_seqlen,
                            max_seqlen, 0.0, scale, left, right});
  const auto result = of.part(out, 0);
  forward_into(problem, result, problem.empty_statistic(result));
  return out;
}

namespace {

std::vector<int64_t> all_or(const at::OptionalIntArrayRef& chosen, int64_t count) {
  if (chosen) return chosen->vec();
  std::vector<int64_t> all(count);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace

at::Tensor weights_of(const AttentionProblem& problem, const at::Tensor& q,
                      at::OptionalIntArrayRef chosen_heads, at::OptionalIntArrayRef chosen_rows) {
  const Attention& a = problem.kernel;
  const auto heads = all_or(chosen_heads, a.heads);
  auto rows = all_or(chosen_rows, a.max_q);
  for (int64_t head : heads) {
    TORCH_CHECK_VALUE(head >= 0 && head < a.heads, "heads: got ", head, ", allowed: 0 to ",
                      a.heads - 1);
  }
  for (int64_t row : rows) {
    TORCH_CHECK_VALUE(row >= 0 && row < a.max_q, "rows: got ", row, ", allowed: 0 to ",
                      a.max_q - 1);
  }
  // The kernel requires queries in ascending order, so `rows` is sorted. If the caller chose
  // another order, the rows of the result are moved to this order after the kernel has run.
  std::vector<int64_t> order(rows.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto i, auto j) { return rows[i] < rows[j]; });
  const bool ascending = std::is_sorted(rows.begin(), rows.end());
  std::sort(rows.begin(), rows.end());
  const int64_t count = (int64_t)rows.size();
  auto weights = empty({a.batch, (int64_t)heads.size(), count, a.max_k}, q.options());
  auto* place = (char*)weights.mutable_data_ptr();
  std::vector<Work> items;
  constexpr int64_t kRows = 96;
  for (int64_t i = 0; i < a.batch * (int64_t)heads.size(); ++i) {
    for (int64_t begin = 0; begin < count; begin += kRows) {
      const int64_t end = std::min(count, begin + kRows);
      items.push_back({{i, 0, begin, end}, (end - begin) * a.max_k * a.head_dim});
    }
  }
  const Kernels& kernel = kernels();
  share_out(items, kernel.attention_weights_scratch(a), [&](const Work& work, void* memory) {
    const int64_t i = work.item.sequence, head_count = (int64_t)heads.size();
    const AttentionItem item = {i / head_count, heads[i % head_count], work.item.begin,
                                work.item.end};
    const int64_t first = (i * count + item.begin) * a.max_k;
    kernel.attention_weights(a, item, rows.data(), place + first * weights.element_size(), memory);
  });
  if (ascending) return weights;
  auto moved = empty_like(weights);
  for (int64_t i = 0; i < count; ++i) moved.select(2, order[i]).copy_(weights.select(2, i));
  return moved;
}

at::Tensor attention_weights(const at::Tensor& q, const at::Tensor& k, const OptionalTensor& mask,
                             const OptionalTensor& bias, const OptionalTensor& cu_seqlens_q,
                             const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q,
                             int64_t max_seqlen_k, at::OptionalIntArrayRef heads,
                             at::OptionalIntArrayRef rows, double scale, int64_t left,
                             int64_t right) {
  const AttentionProblem problem(q, k, k,
                                 {mask, bias, cu_seqlens_q, cu_seqlens_k, std::nullopt,
                                  max_seqlen_q, max_seqlen_k, 0.0, scale, left, right});
  return weights_of(problem, q, heads, rows);
}

}  // namespace fastbert::cpu
