// Attention with terms of relative positions on the CPU. The operators check tensors, divide the
// work into items and distribute the items over threads; isa/kernels.h has the formula
// (RelativeTerms).

#include <vector>

#include "../operators.h"
#include "operands.h"

namespace fastbert::cpu {
namespace {

// The sequences of a batch are divided into at most this many groups. The gradients of the tables
// are summed in each group, and then over the groups, so that the sums do not depend on the number
// of threads.
constexpr int64_t kGroups = 8;

// The checked inputs of a call: those of attention, and the relative terms.
struct RelativeProblem : AttentionProblem {
  RelativeTerms terms{};

  RelativeProblem(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const RelativeArguments& r, const AttentionArguments& arguments)
      : AttentionProblem(q, k, v, arguments) {
    for (const auto* table : {&r.position_keys, &r.position_queries, &r.position_bias}) {
      if (*table && (*table)->dim() >= 1) terms.positions = (*table)->size(0);
    }
    TORCH_CHECK_VALUE(r.position_keys || r.position_queries || r.position_bias,
                      "position_keys: got None, allowed: a tensor, if position_queries and "
                      "position_bias are None");
    read_index(r.index, q);
    terms.keys = table("position_keys", r.position_keys, q);
    terms.queries = table("position_queries", r.position_queries, q);
    if (r.position_bias) {
      check_device("position_bias", *r.position_bias, q);
      check_dtype_or_float("position_bias", *r.position_bias, q.scalar_type(), "q");
      check_shape("position_bias", *r.position_bias, {terms.positions, kernel.heads});
      terms.bias = keep(r.position_bias->t(), at::kFloat).const_data_ptr<float>();
    }
    const bool segmented = r.segment_scores.has_value();
    TORCH_CHECK_VALUE(
        r.q_segments.has_value() == segmented && r.k_segments.has_value() == segmented,
        "segment_scores: got ", segmented ? "a tensor" : "None",
        ", allowed: a tensor if and only if q_segments and k_segments are given");
    if (segmented) read_segments(r, q);
    kernel.relative = &terms;
  }

  RelativeProblem(const RelativeProblem&) = delete;  // `kernel` points into this object

 private:
  const at::Tensor& keep(const at::Tensor& t, at::ScalarType dtype) {
    alive.push_back(private_copy(t, dtype));
    return alive.back();
  }

  void read_index(const at::Tensor& index, const at::Tensor& like) {
    check_device("index", index, like);
    TORCH_CHECK_TYPE(index.scalar_type() == at::kInt, "index: got dtype ", index.scalar_type(),
                     ", allowed: Int");
    const int64_t longest = std::max<int64_t>({1, kernel.max_q, kernel.max_k});
    TORCH_CHECK_VALUE(
        index.dim() == 1 && index.numel() % 2 == 1 && index.numel() >= 2 * longest - 1,
        "index: got shape ", index.sizes(), ", allowed: (2 N - 1,) with N at least ", longest,
        ", the longest sequence");
    const auto& copy = keep(index, at::kInt);
    terms.index = copy.const_data_ptr<int32_t>();
    terms.most = (index.numel() + 1) / 2;
    for (int64_t i = 0; i < index.numel(); ++i) {
      TORCH_CHECK_VALUE(terms.index[i] >= 0 && terms.index[i] < terms.positions, "index: got ",
                        terms.index[i], ", allowed: 0 to ", terms.positions - 1);
    }
  }

  ConstRows table(const char* name, const OptionalTensor& t, const at::Tensor& q) {
    if (!t) return {};
    check_device(name, *t, q);
    check_dtype_of(name, *t, q.scalar_type(), "q");
    check_shape(name, *t, {terms.positions, kernel.heads, kernel.head_dim});
    alive.push_back(t->size(-1) == 1 || t->stride(-1) == 1 ? *t : t->contiguous());
    return {alive.back().const_data_ptr(), 0, alive.back().stride(1), alive.back().stride(0)};
  }

  void read_segments(const RelativeArguments& r, const at::Tensor& q) {
    const auto segments = [&](const char* name, const at::Tensor& t, int64_t rows) {
      check_device(name, t, q);
      TORCH_CHECK_TYPE(t.scalar_type() == at::kInt || t.scalar_type() == at::kLong, name,
                       ": got dtype ", t.scalar_type(), ", allowed: Int, Long");
      if (packed()) {
        check_shape(name, t, {rows});
      } else {
        check_shape(name, t, {kernel.batch, rows});
      }
      const auto& wide = keep(t, at::kLong);
      const auto* numbers = wide.const_data_ptr<int64_t>();
      for (int64_t i = 0; i < wide.numel(); ++i) {
        TORCH_CHECK_VALUE(numbers[i] == (int32_t)numbers[i], name, ": got ", numbers[i],
                          ", allowed: numbers of 32 bits");
      }
      return keep(wide, at::kInt).const_data_ptr<int32_t>();
    };
    terms.q_segments = segments("q_segments", *r.q_segments, q_rows);
    terms.k_segments = segments("k_segments", *r.k_segments, k_rows);
    check_device("segment_scores", *r.segment_scores, q);
    check_dtype_or_float("segment_scores", *r.segment_scores, q.scalar_type(), "q");
    if (packed()) {
      check_shape("segment_scores", *r.segment_scores, {q_rows, kernel.heads});
      terms.segment_scores = keep(r.segment_scores->t(), at::kFloat).const_data_ptr<float>();
    } else {
      check_shape("segment_scores", *r.segment_scores, {kernel.batch, kernel.heads, q_rows});
      terms.segment_scores = keep(*r.segment_scores, at::kFloat).const_data_ptr<float>();
    }
  }
};

}  // namespace

at::Tensor relative_attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      FASTBERT_RELATIVE_ARGUMENTS) {
  RelativeProblem problem(q, k, v, FASTBERT_RELATIVE_VALUES);
  const auto out = problem.empty_result(q);
  forward_into(problem, out, problem.empty_statistic(q));
  return out;
}

at::Tensor relative_attention_of_rows(const at::Tensor& qkv, int64_t heads,
                                      const RelativeArguments& relative, const OptionalTensor& mask,
                                      const OptionalTensor& cu_seqlens, int64_t batch,
                                      int64_t max_seqlen, double scale) {
  const int64_t columns = qkv.size(1) / 3;
  auto out = empty({qkv.size(0), columns}, qkv.options());
  const HeadsOfRows of = {heads, columns / heads, batch, max_seqlen, cu_seqlens.has_value()};
  RelativeProblem problem(of.part(qkv, 0), of.part(qkv, 1), of.part(qkv, 2), relative,
                          {mask, std::nullopt, cu_seqlens, cu_seqlens, std::nullopt, max_seqlen,
                           max_seqlen, 0.0, scale, -1, -1});
  const auto result = of.part(out, 0);
  forward_into(problem, result, problem.empty_statistic(result));
  return out;
}

at::Tensor relative_attention_weights(const at::Tensor& q, const at::Tensor& k,
                                      FASTBERT_RELATIVE_ARGUMENTS) {
  RelativeProblem problem(q, k, k, FASTBERT_RELATIVE_VALUES);
  return weights_of(problem, q, std::nullopt, std::nullopt);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
relative_attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, FASTBERT_RELATIVE_ARGUMENTS) {
  RelativeProblem problem(q, k, v, FASTBERT_RELATIVE_VALUES);
  check_same("dout", dout, q);
  const Attention& a = problem.kernel;
  const auto dq = problem.empty_result(q), dk = problem.empty_result(k);
  const auto dv = problem.empty_result(v);
  AttentionBackward p = {a, problem.read(dout), problem.write("dq", dq), problem.write("dk", dk),
                         problem.write("dv", dv)};
  zero_slack(problem, dq, dk, dv);
  const int64_t groups = std::max<int64_t>(1, std::min(a.batch, kGroups));
  const auto floats = q.options().dtype(at::kFloat);
  const auto sums = [&](bool wanted, at::IntArrayRef shape) {
    return wanted ? zeros(shape, floats) : empty({0}, floats);
  };
  const int64_t positions = problem.terms.positions;
  const auto dkeys = sums(position_keys.has_value(), {groups, a.heads, positions, a.head_dim});
  const auto dqueries =
      sums(position_queries.has_value(), {groups, a.heads, positions, a.head_dim});
  const auto dbias = sums(position_bias.has_value(), {groups, a.heads, positions});
  auto dscores = empty({0}, floats);
  if (segment_scores) {
    dscores = problem.empty_statistic(q);
    if (problem.packed()) {
      dscores.narrow(1, a.cu_q[a.batch], problem.q_rows - a.cu_q[a.batch]).zero_();
    }
  }
  std::vector<Work> items;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t begin = a.batch * group / groups, end = a.batch * (group + 1) / groups;
    int64_t cost = 1;
    for (int64_t b = begin; b < end; ++b) cost += problem.pairs(b) * a.head_dim;
    for (int64_t h = 0; h < a.heads; ++h) items.push_back({{group, h, begin, end}, cost});
  }
  const auto at_group = [&](const at::Tensor& t, int64_t group) {
    return t.numel() == 0 ? nullptr : t.mutable_data_ptr<float>() + group * (t.numel() / groups);
  };
  const Kernels& kernel = kernels();
  share_out(items, kernel.attention_backward_scratch(p, a.max_k),
            [&](const Work& work, void* memory) {
              const int64_t group = work.item.sequence;
              const RelativeGradients gradients = {
                  at_group(dkeys, group), at_group(dqueries, group), at_group(dbias, group),
                  segment_scores ? dscores.mutable_data_ptr<float>() : nullptr};
              kernel.relative_backward(p, gradients, work.item, memory);
            });
  // Adds the groups and returns the gradient in the layout and dtype of the argument.
  const auto finished = [&](const at::Tensor& t, const OptionalTensor& like) {
    if (!like) return t;
    return t.sum(0).transpose(0, 1).to(like->scalar_type()).contiguous();
  };
  if (segment_scores) {
    dscores = (problem.packed() ? dscores.t() : dscores).to(segment_scores->scalar_type());
  }
  return {dq,
          dk,
          dv,
          finished(dkeys, position_keys),
          finished(dqueries, position_queries),
          finished(dbias, position_bias),
          dscores.contiguous()};
}

}  // namespace fastbert::cpu
