// One layer of an encoder in training, in fp32: its forward, which also returns what its backward
// reads, and its backward. Each is one parallel region, because between two operators that Python
// calls, one thread sleeps while the other runs Python.
//
// A call may choose the queries. Then it returns the chosen rows only, and the other rows serve as
// keys and values.

#include <array>
#include <cmath>
#include <vector>

#include "attention/operands.h"
#include "isa/dispatch.h"
#include "operands.h"
#include "operators.h"

namespace fastbert::cpu {
namespace {

// The parameters of a trained layer, in the order of fastbert/ops/encoder.py.
struct LayerParameters {
  static constexpr size_t kCount = 12;
  const at::Tensor &qkv, &qkv_bias, &projection, &projection_bias, &first_norm, &first_norm_bias;
  const at::Tensor &inner, &inner_bias, &outer, &outer_bias, &second_norm, &second_norm_bias;

  explicit LayerParameters(at::TensorList p)
      : qkv(p[0]),
        qkv_bias(p[1]),
        projection(p[2]),
        projection_bias(p[3]),
        first_norm(p[4]),
        first_norm_bias(p[5]),
        inner(p[6]),
        inner_bias(p[7]),
        outer(p[8]),
        outer_bias(p[9]),
        second_norm(p[10]),
        second_norm_bias(p[11]) {}
};

// What the forward keeps for the backward.
enum Kept : size_t {
  kQueries,   // rows of the projection of the queries; empty if all rows are queries
  kKeys,      // rows of the projections of keys and values, after those of the queries if all are
  kRead,      // the chosen rows of the layer's input; empty if all rows are queries
  kAttended,  // the output of attention
  kProjected,
  kFirstMean,
  kFirstScale,
  kMiddle,  // after the first norm
  kInner,   // before the activation
  kOuter,
  kSecondMean,
  kSecondScale,
  kKept
};

// The division of the rows into sequences and the settings of a trained layer.
struct LayerSettings {
  const OptionalTensor &chosen, &cu_seqlens_q, &cu_seqlens_k;
  at::TensorList seeds;
  at::ArrayRef<double> dropouts;  // of attention, of its projection, and of the feed-forward
  int64_t max_seqlen_q, max_seqlen_k, batch, heads;
  double eps;
  const std::string& activation;

  OptionalTensor seed(size_t i) const {
    return dropouts[i] == 0.0 ? std::nullopt : OptionalTensor(seeds[i]);
  }
};

void check_layer(const at::Tensor& hidden, at::TensorList parameters, const LayerSettings& s) {
  check_matrix("hidden", hidden);
  check_dtype_of("hidden", hidden, at::kFloat, "a layer in training");
  const int64_t size = hidden.size(1);
  TORCH_CHECK_VALUE(parameters.size() == LayerParameters::kCount, "parameters: got ",
                    parameters.size(), " tensors, allowed: ", LayerParameters::kCount);
  for (const at::Tensor& parameter : parameters) {
    check_device("parameters", parameter, hidden);
    check_dtype_of("parameters", parameter, at::kFloat, "hidden");
  }
  TORCH_CHECK_VALUE(s.heads >= 1 && size % s.heads == 0, "heads: got ", s.heads,
                    ", allowed: a divisor of ", size, ", the number of columns of hidden");
  check_shape("parameters", parameters[0], {3 * size, size});
  check_shape("parameters", parameters[1], {3 * size});
  TORCH_CHECK_VALUE(s.dropouts.size() == 3, "dropouts: got ", s.dropouts.size(),
                    " numbers, allowed: 3");
  TORCH_CHECK_VALUE(s.seeds.size() == 3 || (s.seeds.empty() && s.dropouts[0] == 0.0 &&
                                            s.dropouts[1] == 0.0 && s.dropouts[2] == 0.0),
                    "seeds: got ", s.seeds.size(), " tensors, allowed: 3, or none without dropout");
  TORCH_CHECK_VALUE(s.cu_seqlens_q.has_value() == s.cu_seqlens_k.has_value(),
                    "cu_seqlens_q: got one of cu_seqlens_q and cu_seqlens_k, allowed: both or "
                    "neither");
  TORCH_CHECK_VALUE(!s.chosen || s.cu_seqlens_q, "chosen: got rows without cu_seqlens_q, allowed: ",
                    "rows with cu_seqlens_q");
  if (s.cu_seqlens_q) return;
  const int64_t rows = hidden.size(0);
  TORCH_CHECK_VALUE(
      s.batch >= 0 && s.max_seqlen_k >= 0 && s.max_seqlen_q == s.max_seqlen_k &&
          (s.batch == 0 ? rows == 0 : rows % s.batch == 0 && rows / s.batch == s.max_seqlen_k),
      "batch, max_seqlen: got ", s.batch, " and ", s.max_seqlen_k, ", allowed: a product of ", rows,
      ", the number of rows of hidden");
}

// Returns the part of rows (T, parts · H) that belongs to one projection: (T, heads, head_dim) of
// packed sequences, otherwise (batch, heads, length, head_dim).
at::Tensor heads_of(const at::Tensor& rows, int64_t part, int64_t size, const LayerSettings& s) {
  const auto own = rows.narrow(1, part * size, size);
  const int64_t head_dim = size / s.heads;
  if (s.cu_seqlens_q) return own.unflatten(1, {s.heads, head_dim});
  return own.unflatten(0, {s.batch, s.max_seqlen_k})
      .unflatten(2, {s.heads, head_dim})
      .transpose(1, 2);
}

// The queries, keys and values among the rows of one or of two projections, or of their gradients.
std::array<at::Tensor, 3> split_heads(const at::Tensor& queries, const at::Tensor& keys,
                                      int64_t size, const LayerSettings& s) {
  if (s.chosen) {
    return {heads_of(queries, 0, size, s), heads_of(keys, 0, size, s), heads_of(keys, 1, size, s)};
  }
  return {heads_of(keys, 0, size, s), heads_of(keys, 1, size, s), heads_of(keys, 2, size, s)};
}

at::Tensor product_with_bias(const at::Tensor& x, const at::Tensor& weight,
                             const OptionalTensor& bias) {
  return std::get<0>(linear(x, weight, bias, std::nullopt, "none", false));
}

double scale_of(int64_t size, const LayerSettings& s) {
  return 1.0 / std::sqrt((double)(size / s.heads));
}

void run_forward(const at::Tensor& hidden, const LayerParameters& p, const LayerSettings& s,
                 std::vector<at::Tensor>& found) {
  const int64_t size = hidden.size(1);
  at::Tensor *kept = &found[1], residual = hidden;
  if (s.chosen) {
    residual = kept[kRead] = hidden.index_select(0, *s.chosen);
    kept[kQueries] = product_with_bias(residual, p.qkv.narrow(0, 0, size),
                                       p.qkv_bias.narrow(0, 0, size));
    kept[kKeys] = product_with_bias(hidden, p.qkv.narrow(0, size, 2 * size),
                                    p.qkv_bias.narrow(0, size, 2 * size));
  } else {
    kept[kKeys] = product_with_bias(hidden, p.qkv, p.qkv_bias);
  }
  const auto [q, k, v] = split_heads(kept[kQueries], kept[kKeys], size, s);
  auto out = std::get<0>(attention_forward(
      q, k, v, std::nullopt, std::nullopt, s.cu_seqlens_q, s.cu_seqlens_k, s.seed(0),
      s.max_seqlen_q, s.max_seqlen_k, s.dropouts[0], scale_of(size, s), -1, -1));
  if (!s.cu_seqlens_q) out = out.transpose(1, 2);
  kept[kAttended] = out.reshape({residual.size(0), size});
  kept[kProjected] = product_with_bias(kept[kAttended], p.projection, std::nullopt);
  std::tie(kept[kMiddle], kept[kFirstMean], kept[kFirstScale]) =
      layer_norm_forward(kept[kProjected], p.first_norm, p.first_norm_bias, residual,
                         p.projection_bias, s.seed(1), s.dropouts[1], s.eps);
  at::Tensor activated;
  std::tie(activated, kept[kInner]) =
      linear(kept[kMiddle], p.inner, p.inner_bias, std::nullopt, s.activation, true);
  kept[kOuter] = product_with_bias(activated, p.outer, std::nullopt);
  std::tie(found[0], kept[kSecondMean], kept[kSecondScale]) =
      layer_norm_forward(kept[kOuter], p.second_norm, p.second_norm_bias, kept[kMiddle],
                         p.outer_bias, s.seed(2), s.dropouts[2], s.eps);
}

at::Tensor gradient_of_weight(const at::Tensor& dy, const at::Tensor& x) {
  return matmul(dy.t(), x, std::nullopt, at::kFloat);
}

// Returns the gradients of hidden and of the parameters, in their order.
std::vector<at::Tensor> run_backward(const at::Tensor& dy, const at::Tensor& hidden,
                                     const LayerParameters& p, at::TensorList kept,
                                     const LayerSettings& s) {
  const int64_t size = hidden.size(1);
  const auto norm_gradients = [&](const at::Tensor& dy_of, Kept x, Kept mean, Kept rstd,
                                  const at::Tensor& weight, const at::Tensor& residual,
                                  const at::Tensor& x_bias, size_t dropout) {
    auto found = layer_norm_backward(dy_of, kept[x], weight, kept[mean], kept[rstd], residual,
                                     x_bias, s.seed(dropout), true, s.dropouts[dropout]);
    // Without dropout, the gradient of x is that of the sum.
    if (s.dropouts[dropout] == 0.0) std::get<1>(found) = std::get<0>(found);
    return found;
  };
  const auto [dmiddle_sum, douter, dsecond, dsecond_bias, douter_bias] =
      norm_gradients(dy, kOuter, kSecondMean, kSecondScale, p.second_norm, kept[kMiddle],
                     p.outer_bias, 2);
  const auto [dinner, dinner_bias, activated] =
      activation_backward(matmul(douter, p.outer, std::nullopt, at::kFloat), kept[kInner],
                          std::nullopt, s.activation, true, true);
  const auto dmiddle = matmul(dinner, p.inner, dmiddle_sum, at::kFloat);
  const auto dinner_weight = gradient_of_weight(dinner, kept[kMiddle]);
  const auto douter_weight = gradient_of_weight(douter, activated);
  const auto& residual = s.chosen ? kept[kRead] : hidden;
  const auto [dresidual, dprojected, dfirst, dfirst_bias, dprojection_bias] =
      norm_gradients(dmiddle, kProjected, kFirstMean, kFirstScale, p.first_norm, residual,
                     p.projection_bias, 1);
  const auto dattended = matmul(dprojected, p.projection, std::nullopt, at::kFloat);
  const auto dprojection = gradient_of_weight(dprojected, kept[kAttended]);
  const auto dqueries = empty_like(kept[kQueries]), dkeys = empty_like(kept[kKeys]);
  const auto [q, k, v] = split_heads(kept[kQueries], kept[kKeys], size, s);
  const auto [dq, dk, dv] = split_heads(dqueries, dkeys, size, s);
  attention_backward(dq, dk, dv, std::nullopt, heads_of(dattended, 0, size, s), q, k, v,
                     std::nullopt, std::nullopt, s.cu_seqlens_q, s.cu_seqlens_k, s.seed(0),
                     s.max_seqlen_q, s.max_seqlen_k, s.dropouts[0], scale_of(size, s), -1, -1);
  at::Tensor dhidden, dqkv, dqkv_bias;
  if (s.chosen) {
    const auto dread =
        matmul(dqueries, p.qkv.narrow(0, 0, size), dresidual, at::kFloat);
    dhidden = matmul(dkeys, p.qkv.narrow(0, size, 2 * size),
                     scatter_rows(dread, *s.chosen, hidden.size(0)), at::kFloat);
    dqkv = empty_like(p.qkv);
    matmul_into(dqkv.narrow(0, 0, size), dqueries.t(), kept[kRead], std::nullopt);
    matmul_into(dqkv.narrow(0, size, 2 * size), dkeys.t(), hidden, std::nullopt);
    dqkv_bias = empty_like(p.qkv_bias);
    dqkv_bias.narrow(0, 0, size).copy_(sum_rows(dqueries));
    dqkv_bias.narrow(0, size, 2 * size).copy_(sum_rows(dkeys));
  } else {
    dhidden = matmul(dkeys, p.qkv, dresidual, at::kFloat);
    dqkv = gradient_of_weight(dkeys, hidden);
    dqkv_bias = sum_rows(dkeys);
  }
  return {dhidden,       dqkv,        dqkv_bias,     dprojection, dprojection_bias,
          dfirst,        dfirst_bias, dinner_weight, dinner_bias, douter_weight,
          douter_bias,   dsecond,     dsecond_bias};
}

void check_kept_rows(const at::Tensor& hidden, at::TensorList kept, const LayerSettings& s) {
  TORCH_CHECK_VALUE(kept.size() == kKept, "kept: got ", kept.size(), " tensors, allowed: ", (int)kKept);
  const int64_t rows = hidden.size(0), size = hidden.size(1);
  check_floats("kept", kept[kKeys], hidden, {rows, (s.chosen ? 2 : 3) * size});
  if (!s.chosen) return;
  const int64_t count = s.chosen->numel();
  check_floats("kept", kept[kQueries], hidden, {count, size});
  check_floats("kept", kept[kRead], hidden, {count, size});
}

}  // namespace

at::Tensor sum_rows(const at::Tensor& x_in) {
  check_matrix("x", x_in);
  check_dtype_of("x", x_in, at::kFloat, "a sum of rows");
  const auto x = fastbert::with_unit_columns(x_in);
  const int64_t rows = x.size(0), columns = x.size(1);
  auto sum = empty({columns}, x.options());
  const int64_t starts[] = {0, rows}, target = 0;
  const SegmentSums params = {
      Format::f32, columns, x.const_data_ptr<float>(), x.stride(0), nullptr,
      starts,      &target, sum.mutable_data_ptr(),    columns};
  const Kernels& k = kernels();
  parallel_for((columns + kStripColumns - 1) / kStripColumns, grain_rows(kStripColumns * rows + 1),
               [&](int64_t begin, int64_t end) { k.sum_segments(params, begin, end); });
  return sum;
}

std::vector<at::Tensor> layer_forward(
    const at::Tensor& hidden, at::TensorList parameters, const OptionalTensor& chosen,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k, at::TensorList seeds,
    at::ArrayRef<double> dropouts, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t batch,
    int64_t heads, double eps, const std::string& activation) {
  const LayerSettings s = {chosen,       cu_seqlens_q, cu_seqlens_k, seeds, dropouts,
                           max_seqlen_q, max_seqlen_k, batch,        heads, eps,
                           activation};
  check_layer(hidden, parameters, s);
  std::vector<at::Tensor> found(1 + kKept);
  found[1 + kQueries] = found[1 + kRead] = empty({0, hidden.size(1)}, hidden.options());
  const auto run = [&] { run_forward(hidden, LayerParameters(parameters), s, found); };
  worth_a_team(hidden.size(0), parameters) ? together(run) : run();
  return found;
}

std::vector<at::Tensor> layer_backward(
    const at::Tensor& dy, const at::Tensor& hidden, at::TensorList parameters, at::TensorList kept,
    const OptionalTensor& chosen, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, at::TensorList seeds, at::ArrayRef<double> dropouts,
    int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t batch, int64_t heads, double eps,
    const std::string& activation) {
  const LayerSettings s = {chosen,       cu_seqlens_q, cu_seqlens_k, seeds, dropouts,
                           max_seqlen_q, max_seqlen_k, batch,        heads, eps,
                           activation};
  check_layer(hidden, parameters, s);
  check_kept_rows(hidden, kept, s);
  std::vector<at::Tensor> found;
  const auto run = [&] { found = run_backward(dy, hidden, LayerParameters(parameters), kept, s); };
  worth_a_team(hidden.size(0), parameters) ? together(run) : run();
  return found;
}

}  // namespace fastbert::cpu
