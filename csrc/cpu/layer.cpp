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

// What the forward keeps for the backward. The last two exist only if queries were chosen.
enum Kept : size_t {
  kKeys,      // rows of the projections of keys and values, after the queries if all are queries
  kAttended,  // the output of attention
  kProjected,
  kFirstMean,
  kFirstScale,
  kMiddle,  // after the first norm
  kInner,   // before the activation
  kOuter,
  kSecondMean,
  kSecondScale,
  kQueries,  // rows of the projection of the queries
  kRead,     // the chosen rows of the layer's input
};

size_t kept_of(const OptionalTensor& chosen) { return chosen ? kRead + 1 : kQueries; }

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

void check_seeds(const LayerSettings& s) {
  TORCH_CHECK_VALUE(s.dropouts.size() == 3, "dropouts: got ", s.dropouts.size(),
                    " numbers, allowed: 3");
  for (const double p : s.dropouts) {
    TORCH_CHECK_VALUE(p >= 0.0 && p <= 1.0, "dropouts: got ", p, ", allowed: 0 to 1");
    TORCH_CHECK_VALUE(p == 0.0 || s.seeds.size() == 3, "dropouts, seeds: got ", p, " and ",
                      s.seeds.size(), " tensors, allowed: 3, or none without dropout");
  }
  for (const at::Tensor& seed : s.seeds) {
    TORCH_CHECK_VALUE(seed.is_cpu() && seed.scalar_type() == at::kLong && seed.numel() == 1,
                      "seeds: got dtype ", seed.scalar_type(), " and shape ", seed.sizes(),
                      ", allowed: Long of one element on the CPU");
  }
}

// Checks the division into sequences. The operators of attention check the lengths.
void check_sequences(const at::Tensor& hidden, const LayerSettings& s) {
  const int64_t rows = hidden.size(0);
  TORCH_CHECK_VALUE(s.cu_seqlens_q.has_value() == s.cu_seqlens_k.has_value(),
                    "cu_seqlens_q, cu_seqlens_k: got one of them, allowed: both or neither");
  if (s.cu_seqlens_q) {
    TORCH_CHECK_VALUE(s.cu_seqlens_q->dim() == 1 && s.cu_seqlens_q->numel() == s.batch + 1,
                      "cu_seqlens_q: got shape ", s.cu_seqlens_q->sizes(), ", allowed: (",
                      s.batch + 1, ",) for the batch ", s.batch);
  } else {
    // batch * max_seqlen_k could overflow and is not formed.
    TORCH_CHECK_VALUE(
        s.batch >= 0 && s.max_seqlen_k >= 0 && s.max_seqlen_q == s.max_seqlen_k &&
            (s.batch == 0 ? rows == 0 : rows % s.batch == 0 && rows / s.batch == s.max_seqlen_k),
        "batch, max_seqlen_q, max_seqlen_k: got ", s.batch, ", ", s.max_seqlen_q, " and ",
        s.max_seqlen_k, ", allowed: a product of ", rows, ", the number of rows of hidden");
  }
  if (!s.chosen) return;
  TORCH_CHECK_VALUE(s.cu_seqlens_q, "chosen: got rows without cu_seqlens_q, allowed: None");
  const int64_t* row = s.chosen->const_data_ptr<int64_t>();
  for (int64_t i = 0; i < s.chosen->numel(); ++i) {
    TORCH_CHECK_VALUE(row[i] > (i == 0 ? -1 : row[i - 1]) && row[i] < rows, "chosen: got ", row[i],
                      " at ", i, ", allowed: increasing numbers from 0 to ", rows - 1);
  }
}

void check_layer(const at::Tensor& hidden, at::TensorList parameters, const LayerSettings& s) {
  check_matrix("hidden", hidden);
  check_floats("hidden", hidden, hidden, {hidden.size(0), hidden.size(1)});
  const int64_t size = hidden.size(1);
  TORCH_CHECK_VALUE(s.heads >= 1 && size % s.heads == 0, "heads: got ", s.heads,
                    ", allowed: a divisor of ", size, ", the number of columns of hidden");
  TORCH_CHECK_VALUE(parameters.size() == LayerParameters::kCount && parameters[6].dim() == 2 &&
                        parameters[6].size(0) >= 1,
                    "parameters: got ", parameters.size(),
                    " tensors, allowed: ", LayerParameters::kCount, ", number 6 a matrix");
  const int64_t inner = parameters[6].size(0);
  check_floats("parameters", parameters[0], hidden, {3 * size, size});
  check_floats("parameters", parameters[1], hidden, {3 * size});
  check_floats("parameters", parameters[2], hidden, {size, size});
  check_floats("parameters", parameters[6], hidden, {inner, size});
  check_floats("parameters", parameters[7], hidden, {inner});
  check_floats("parameters", parameters[8], hidden, {size, inner});
  for (const int i : {3, 4, 5, 9, 10, 11})
    check_floats("parameters", parameters[i], hidden, {size});
  check_eps(s.eps);
  activation_of(s.activation, {Activation::gelu, Activation::gelu_tanh, Activation::relu});
  check_seeds(s);
  check_sequences(hidden, s);
}

// Returns a private copy of the chosen rows, which other threads cannot change.
OptionalTensor copied(const OptionalTensor& chosen) {
  if (!chosen) return std::nullopt;
  TORCH_CHECK_TYPE(chosen->scalar_type() == at::kLong, "chosen: got dtype ", chosen->scalar_type(),
                   ", allowed: Long");
  TORCH_CHECK_VALUE(chosen->is_cpu() && chosen->dim() == 1, "chosen: got shape ", chosen->sizes(),
                    ", allowed: (N,) on the CPU");
  return private_copy(*chosen, at::kLong);
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
    kept[kQueries] =
        product_with_bias(residual, p.qkv.narrow(0, 0, size), p.qkv_bias.narrow(0, 0, size));
    kept[kKeys] = product_with_bias(hidden, p.qkv.narrow(0, size, 2 * size),
                                    p.qkv_bias.narrow(0, size, 2 * size));
  } else {
    kept[kKeys] = product_with_bias(hidden, p.qkv, p.qkv_bias);
  }
  const auto [q, k, v] = split_heads(kept[s.chosen ? kQueries : kKeys], kept[kKeys], size, s);
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
  const auto [dmiddle_sum, douter, dsecond, dsecond_bias, douter_bias] = norm_gradients(
      dy, kOuter, kSecondMean, kSecondScale, p.second_norm, kept[kMiddle], p.outer_bias, 2);
  const auto [dinner, dinner_bias, activated] =
      activation_backward(matmul(douter, p.outer, std::nullopt, at::kFloat), kept[kInner],
                          std::nullopt, s.activation, true, true);
  const auto dmiddle = matmul(dinner, p.inner, dmiddle_sum, at::kFloat);
  const auto dinner_weight = gradient_of_weight(dinner, kept[kMiddle]);
  const auto douter_weight = gradient_of_weight(douter, activated);
  const auto& residual = s.chosen ? kept[kRead] : hidden;
  const auto [dresidual, dprojected, dfirst, dfirst_bias, dprojection_bias] = norm_gradients(
      dmiddle, kProjected, kFirstMean, kFirstScale, p.first_norm, residual, p.projection_bias, 1);
  const auto dattended = matmul(dprojected, p.projection, std::nullopt, at::kFloat);
  const auto dprojection = gradient_of_weight(dprojected, kept[kAttended]);
  const auto dkeys = empty(kept[kKeys].sizes(), hidden.options());
  const auto dqueries = s.chosen ? empty(kept[kQueries].sizes(), hidden.options()) : dkeys;
  const auto [q, k, v] = split_heads(kept[s.chosen ? kQueries : kKeys], kept[kKeys], size, s);
  const auto [dq, dk, dv] = split_heads(dqueries, dkeys, size, s);
  attention_backward(dq, dk, dv, std::nullopt, heads_of(dattended, 0, size, s), q, k, v,
                     std::nullopt, std::nullopt, s.cu_seqlens_q, s.cu_seqlens_k, s.seed(0),
                     s.max_seqlen_q, s.max_seqlen_k, s.dropouts[0], scale_of(size, s), -1, -1);
  at::Tensor dhidden, dqkv, dqkv_bias;
  if (s.chosen) {
    const auto dread = matmul(dqueries, p.qkv.narrow(0, 0, size), dresidual, at::kFloat);
    dhidden = matmul(dkeys, p.qkv.narrow(0, size, 2 * size),
                     scatter_rows(dread, *s.chosen, hidden.size(0)), at::kFloat);
    dqkv = empty(p.qkv.sizes(), p.qkv.options());
    matmul_into(dqkv.narrow(0, 0, size), dqueries.t(), kept[kRead], std::nullopt);
    matmul_into(dqkv.narrow(0, size, 2 * size), dkeys.t(), hidden, std::nullopt);
    dqkv_bias = empty({3 * size}, p.qkv.options());
    dqkv_bias.narrow(0, 0, size).copy_(sum_rows(dqueries));
    dqkv_bias.narrow(0, size, 2 * size).copy_(sum_rows(dkeys));
  } else {
    dhidden = matmul(dkeys, p.qkv, dresidual, at::kFloat);
    dqkv = gradient_of_weight(dkeys, hidden);
    dqkv_bias = sum_rows(dkeys);
  }
  return {dhidden,     dqkv,        dqkv_bias,     dprojection, dprojection_bias,
          dfirst,      dfirst_bias, dinner_weight, dinner_bias, douter_weight,
          douter_bias, dsecond,     dsecond_bias};
}

void check_kept(const at::Tensor& dy, const at::Tensor& hidden, at::TensorList kept, int64_t inner,
                const LayerSettings& s) {
  const int64_t total = hidden.size(0), size = hidden.size(1);
  const int64_t rows = s.chosen ? s.chosen->numel() : total;
  check_floats("dy", dy, hidden, {rows, size});
  TORCH_CHECK_VALUE(kept.size() == kept_of(s.chosen), "kept: got ", kept.size(),
                    " tensors, allowed: ", kept_of(s.chosen));
  check_floats("kept", kept[kKeys], hidden, {total, (s.chosen ? 2 : 3) * size});
  check_floats("kept", kept[kInner], hidden, {rows, inner});
  for (const Kept i : {kAttended, kProjected, kMiddle, kOuter}) {
    check_floats("kept", kept[i], hidden, {rows, size});
  }
  if (s.chosen) {
    check_floats("kept", kept[kQueries], hidden, {rows, size});
    check_floats("kept", kept[kRead], hidden, {rows, size});
  }
  for (const Kept i : {kFirstMean, kFirstScale, kSecondMean, kSecondScale}) {
    check_floats("kept", kept[i], hidden, {rows});
  }
}

}  // namespace

at::Tensor sum_rows(const at::Tensor& x_in) {
  check_matrix("x", x_in);
  check_floats("x", x_in, x_in, {x_in.size(0), x_in.size(1)});
  const auto x = fastbert::with_unit_columns(x_in);
  const int64_t rows = x.size(0), columns = x.size(1);
  auto sum = empty({columns}, x.options());
  const int64_t starts[] = {0, rows}, target = 0;
  const SegmentSums params = {Format::f32, columns, x.const_data_ptr<float>(), x.stride(0), nullptr,
                              starts,      &target, sum.mutable_data_ptr(),    columns};
  const Kernels& k = kernels();
  parallel_for((columns + kStripColumns - 1) / kStripColumns, grain_rows(kStripColumns * rows + 1),
               [&](int64_t begin, int64_t end) { k.sum_segments(params, begin, end); });
  return sum;
}

std::vector<at::Tensor> layer_forward(const at::Tensor& hidden, at::TensorList parameters,
                                      const OptionalTensor& chosen_in,
                                      const OptionalTensor& cu_seqlens_q,
                                      const OptionalTensor& cu_seqlens_k, at::TensorList seeds,
                                      at::ArrayRef<double> dropouts, int64_t max_seqlen_q,
                                      int64_t max_seqlen_k, int64_t batch, int64_t heads,
                                      double eps, const std::string& activation) {
  const OptionalTensor chosen = copied(chosen_in);
  const LayerSettings s = {chosen,       cu_seqlens_q, cu_seqlens_k, seeds, dropouts,  max_seqlen_q,
                           max_seqlen_k, batch,        heads,        eps,   activation};
  check_layer(hidden, parameters, s);
  std::vector<at::Tensor> found(1 + kept_of(chosen));
  const auto run = [&] { run_forward(hidden, LayerParameters(parameters), s, found); };
  worth_a_team(hidden.size(0), parameters) ? together(run) : run();
  return found;
}

std::vector<at::Tensor> layer_backward(const at::Tensor& dy, const at::Tensor& hidden,
                                       at::TensorList parameters, at::TensorList kept,
                                       const OptionalTensor& chosen_in,
                                       const OptionalTensor& cu_seqlens_q,
                                       const OptionalTensor& cu_seqlens_k, at::TensorList seeds,
                                       at::ArrayRef<double> dropouts, int64_t max_seqlen_q,
                                       int64_t max_seqlen_k, int64_t batch, int64_t heads,
                                       double eps, const std::string& activation) {
  const OptionalTensor chosen = copied(chosen_in);
  const LayerSettings s = {chosen,       cu_seqlens_q, cu_seqlens_k, seeds, dropouts,  max_seqlen_q,
                           max_seqlen_k, batch,        heads,        eps,   activation};
  check_layer(hidden, parameters, s);
  check_kept(dy, hidden, kept, parameters[6].size(0), s);
  std::vector<at::Tensor> found;
  const auto run = [&] { found = run_backward(dy, hidden, LayerParameters(parameters), kept, s); };
  worth_a_team(hidden.size(0), parameters) ? together(run) : run();
  return found;
}

}  // namespace fastbert::cpu
