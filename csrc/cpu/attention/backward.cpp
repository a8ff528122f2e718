// Attention backward on the CPU. The operator checks tensors, divides the work into items and
// distributes the items over threads.

#include "operands.h"

namespace fastbert::cpu {
namespace {

// The division of a backward pass into pieces. A head is divided if it has more than one thread's
// share of the work, and more than one block of queries and of keys. Such a head is divided twice:
// into blocks of queries, which are pieces in `first`, and into blocks of keys, which are pieces in
// `second`. Every other head is one piece in `first`. All pieces in `first` run before the pieces
// in `second`.
struct BackwardPlan {
  struct Piece {
    AttentionItem item;
    int64_t cost;
    AttentionPass pass;
  };
  std::vector<Piece> first, second;

  explicit BackwardPlan(const AttentionProblem& problem) {
    const Attention& a = problem.kernel;
    int64_t total = 0;
    for (int64_t b = 0; b < a.batch; ++b) total += problem.pairs(b) * a.heads;
    const int64_t share = total / at::get_num_threads();
    for (int64_t b = 0; b < a.batch; ++b) {
      const int64_t cost = problem.pairs(b), queries = problem.q_length(b);
      const int64_t keys = problem.k_length(b);
      const bool split = cost > share && queries > kAttentionQueries && keys > kAttentionKeys;
      for (int64_t h = 0; h < a.heads; ++h) {
        if (!split) {
          first.push_back({{b, h, 0, 0}, 5 * cost * a.head_dim, AttentionPass::whole});
          continue;
        }
        for (int64_t i = 0; i < queries; i += kAttentionQueries) {
          const int64_t end = std::min(queries, i + kAttentionQueries);
          const int64_t part = 3 * cost / queries * (end - i) * a.head_dim;
          first.push_back({{b, h, i, end}, part, AttentionPass::queries});
        }
        for (int64_t j = 0; j < keys; j += kAttentionKeys) {
          const int64_t end = std::min(keys, j + kAttentionKeys);
          const int64_t part = 4 * cost / keys * (end - j) * a.head_dim;
          second.push_back({{b, h, j, end}, part, AttentionPass::keys});
        }
      }
    }
  }
};

}  // namespace

void zero_slack(const AttentionProblem& problem, const at::Tensor& dq, const at::Tensor& dk,
                const at::Tensor& dv) {
  const Attention& a = problem.kernel;
  if (!problem.packed()) return;
  dq.narrow(0, a.cu_q[a.batch], problem.q_rows - a.cu_q[a.batch]).zero_();
  dk.narrow(0, a.cu_k[a.batch], problem.k_rows - a.cu_k[a.batch]).zero_();
  dv.narrow(0, a.cu_k[a.batch], problem.k_rows - a.cu_k[a.batch]).zero_();
}

namespace {

// Computes the gradient of the bias. The kernel reads the statistics of each row that
// attention_backward stored while it computed the other gradients.
void bias_gradient(AttentionBackward& p, const at::Tensor& dbias) {
  auto sums = empty(dbias.sizes(), dbias.options().dtype(at::kFloat));
  const auto stride = [&](int i) { return sums.size(i) == 1 ? 0 : sums.stride(i); };
  p.dbias = sums.mutable_data_ptr<float>();
  p.dbias_batch = stride(0), p.dbias_head = stride(1);
  p.dbias_row = stride(2), p.dbias_key = stride(3);
  std::vector<Work> items;
  for (int64_t b = 0; b < sums.size(0); ++b) {
    for (int64_t h = 0; h < sums.size(1); ++h) {
      for (int64_t i = 0; i < sums.size(2); i += kAttentionQueries) {
        for (int64_t j = 0; j < sums.size(3); j += kAttentionKeys) {
          items.push_back({{b, h, i, j}, kAttentionQueries * kAttentionKeys * p.forward.head_dim});
        }
      }
    }
  }
  const Kernels& k = kernels();
  share_out(items, k.attention_bias_scratch(p), [&](const Work& work, void* memory) {
    k.attention_bias_gradient(p, work.item, memory);
  });
  dbias.copy_(sums);
}

}  // namespace

void attention_backward(const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                        const OptionalTensor& dbias, const at::Tensor& dout, const at::Tensor& q,
                        const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask,
                        const OptionalTensor& bias, const OptionalTensor& cu_seqlens_q,
                        const OptionalTensor& cu_seqlens_k, const OptionalTensor& seed,
                        int64_t max_seqlen_q, int64_t max_seqlen_k, double dropout_p, double scale,
                        int64_t left, int64_t right) {
  AttentionProblem problem(q, k, v,
                           {mask, bias, cu_seqlens_q, cu_seqlens_k, seed, max_seqlen_q,
                            max_seqlen_k, dropout_p, scale, left, right});
  check_same("dout", dout, q);
  check_same("dq", dq, q);
  check_same("dk", dk, k);
  check_same("dv", dv, v);
  if (dbias) {
    TORCH_CHECK_VALUE(bias.has_value(), "dbias: got a tensor without bias, allowed: None");
    check_same("dbias", *dbias, *bias);
    check_no_overlap("dbias", *dbias);
  }
  AttentionBackward p = {problem.kernel, problem.read(dout), problem.write("dq", dq),
                         problem.write("dk", dk), problem.write("dv", dv)};
  zero_slack(problem, dq, dk, dv);
  BackwardPlan plan(problem);
  at::Tensor statistics[3];
  if (dbias || !plan.second.empty()) {
    for (auto& statistic : statistics) statistic = problem.empty_statistic(q);
    p.maximum = statistics[0].mutable_data_ptr<float>();
    p.sum = statistics[1].mutable_data_ptr<float>();
    p.delta = statistics[2].mutable_data_ptr<float>();
  }
  const Kernels& kernel = kernels();
  const auto run = [&](const BackwardPlan::Piece& piece, void* memory) {
    kernel.attention_backward(p, piece.pass, piece.item, memory);
  };
  const int64_t longest = problem.kernel.max_k;
  share_out(plan.first, kernel.attention_backward_scratch(p, longest), run);
  share_out(plan.second, kernel.attention_backward_scratch(p, kAttentionKeys), run);
  if (dbias) bias_gradient(p, *dbias);
}

}  // namespace fastbert::cpu
