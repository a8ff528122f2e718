// One layer of an encoder in training. The file has a forward, which also returns the tensors that
// the backward reads, and a backward. A call of the forward or of the backward is one parallel
// region, because the worker threads would go to sleep if Python ran between two operators.
//
// The rows between layers, the parameters and the parameters' gradients are fp32. Under autocast,
// products and attention compute in another dtype, as separate operators do. Products round their
// operands to this dtype, and the results of products and attention have this dtype.
//
// A call may choose the rows that are queries. The result then has only the chosen rows, and the
// other rows are used as keys and values only.

#include <array>
#include <cmath>
#include <vector>

#include "attention/operands.h"
#include "isa/dispatch.h"
#include "layer_parameters.h"
#include "operands.h"
#include "operators.h"
#include "rows/sums.h"

namespace fastbert::cpu {
namespace {

// The indices of the tensors that the forward stores for the backward. A tensor that a layer does
// not need is empty.
enum Kept : size_t {
  kKeys,       // keys and values or, if every row is a query, queries, keys and values
  kAttended,   // the output of attention
  kProjected,  // projection of kAttended, if a norm is after attention
  kFirstMean,
  kFirstScale,
  kMiddle,  // input of the feed-forward, or of the norm before the feed-forward if there is one
  kInner,   // result of the feed-forward's first product, before the activation
  kOuter,   // result of the feed-forward's second product, if a norm is after the feed-forward
  kSecondMean,
  kSecondScale,
  kQueries,  // queries, if the call chose the rows that are queries
  kRead,     // the chosen rows of the layer's input
  kFirst,    // input of attention, if a norm is before attention
  kSecond,   // input of the feed-forward, if a norm is before the feed-forward
  kCount,
};

// The settings of a layer in training, and the division of the rows into sequences.
struct LayerSettings {
  const OptionalTensor &chosen, &cu_seqlens_q, &cu_seqlens_k;
  at::TensorList seeds, rotation;  // rotation: cosines and sines, or empty
  // The dropout probabilities of the attention weights, the attention output and the feed-forward.
  at::ArrayRef<double> dropouts;
  int64_t max_seqlen_q, max_seqlen_k, batch, heads, projections, inner_projections;
  int64_t window;  // largest distance between a query and a key; -1 for no limit
  bool pre_norm;
  double eps;
  const std::string& activation;
  at::ScalarType dtype;  // dtype of products and attention

  OptionalTensor seed(size_t i) const {
    return dropouts[i] == 0.0 ? std::nullopt : OptionalTensor(seeds[i]);
  }

  LayerParameters parameters(at::TensorList given) const {
    return {given.data(), projections, inner_projections};
  }
};

// The parameters of a linear layer that has one or more weights and as many biases; the outputs of
// the weights follow one another. The same struct also holds the gradients of these parameters. An
// absent bias is an empty tensor.
struct Linear {
  std::vector<at::Tensor> weights, biases;

  Linear(const at::Tensor* first, int64_t count)
      : weights(first, first + count), biases(first + count, first + 2 * count) {}

  // Returns the part of the layer that computes the outputs [begin, end). If only some rows of a
  // weight compute these outputs, the part has only these rows.
  Linear rows(int64_t begin, int64_t end) const {
    Linear part(nullptr, 0);
    for (size_t i = 0; i < weights.size(); ++i) {
      const int64_t length = weights[i].size(0);
      const int64_t from = std::max<int64_t>(begin, 0), to = std::min(end, length);
      if (from < to) {
        part.weights.push_back(weights[i].narrow(0, from, to - from));
        part.biases.push_back(present(biases[i]) ? biases[i].narrow(0, from, to - from)
                                                 : biases[i]);
      }
      begin -= length, end -= length;
    }
    return part;
  }

  // Returns a layer of uninitialised tensors with the shapes and dtypes of this layer's tensors.
  Linear empty_like() const {
    Linear made(nullptr, 0);
    for (size_t i = 0; i < weights.size(); ++i) {
      made.weights.push_back(empty(weights[i].sizes(), weights[i].options()));
      made.biases.push_back(empty(biases[i].sizes(), biases[i].options()));
    }
    return made;
  }

  void append_to(std::vector<at::Tensor>& list) const {
    list.insert(list.end(), weights.begin(), weights.end());
    list.insert(list.end(), biases.begin(), biases.end());
  }
};

// The following functions check the arguments of a layer.

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

// Checks the arguments that divide the rows into sequences. The operators of attention check the
// numbers in cu_seqlens_q and cu_seqlens_k.
void check_sequences(const at::Tensor& hidden, const LayerSettings& s) {
  const int64_t rows = hidden.size(0);
  TORCH_CHECK_VALUE(s.cu_seqlens_q.has_value() == s.cu_seqlens_k.has_value(),
                    "cu_seqlens_q, cu_seqlens_k: got one of them, allowed: both or neither");
  if (s.cu_seqlens_q) {
    TORCH_CHECK_VALUE(s.cu_seqlens_q->dim() == 1 && s.cu_seqlens_q->numel() == s.batch + 1,
                      "cu_seqlens_q: got shape ", s.cu_seqlens_q->sizes(), ", allowed: (",
                      s.batch + 1, ",) for the batch ", s.batch);
  } else {
    // The product batch * max_seqlen_k is not computed, because it could overflow.
    TORCH_CHECK_VALUE(
        s.batch >= 0 && s.max_seqlen_k >= 0 && s.max_seqlen_q == s.max_seqlen_k &&
            (s.batch == 0 ? rows == 0 : rows % s.batch == 0 && rows / s.batch == s.max_seqlen_k),
        "batch, max_seqlen_q, max_seqlen_k: got ", s.batch, ", ", s.max_seqlen_q, " and ",
        s.max_seqlen_k, ", allowed: a product of ", rows, ", the number of rows of hidden");
  }
  if (!s.chosen) return;
  TORCH_CHECK_VALUE(s.cu_seqlens_q, "chosen: got rows without cu_seqlens_q, allowed: None");
  TORCH_CHECK_VALUE(s.rotation.empty() && !s.pre_norm,
                    "chosen: got rows with a rotation or pre_norm, allowed: None");
  const int64_t* row = s.chosen->const_data_ptr<int64_t>();
  for (int64_t i = 0; i < s.chosen->numel(); ++i) {
    TORCH_CHECK_VALUE(row[i] > (i == 0 ? -1 : row[i - 1]) && row[i] < rows, "chosen: got ", row[i],
                      " at ", i, ", allowed: increasing numbers from 0 to ", rows - 1);
  }
}

// Checks `count` weights from `first` on, which must have `columns` columns, and the biases that
// follow. The weights must have `outputs` rows in total, where -1 allows any number. Returns the
// total number of rows.
int64_t check_linear(const at::Tensor* first, int64_t count, int64_t columns, int64_t outputs,
                     const at::Tensor& hidden) {
  int64_t rows = 0, biased = 0;
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor &weight = first[i], &bias = first[count + i];
    TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(0) >= 1,
                      "parameters: got a weight of shape ", weight.sizes(), ", allowed: (·, ",
                      columns, ")");
    check_floats("parameters", weight, hidden, {weight.size(0), columns});
    if (present(bias)) check_floats("parameters", bias, hidden, {weight.size(0)});
    rows += weight.size(0), biased += present(bias).has_value();
  }
  TORCH_CHECK_VALUE(biased == 0 || biased == count, "parameters: got ", biased, " biases of ",
                    count, " weights, allowed: a bias of each weight, or none");
  TORCH_CHECK_VALUE(outputs < 0 || rows == outputs, "parameters: got weights with ", rows,
                    " rows, allowed: ", outputs);
  return rows;
}

void check_norm(const at::Tensor* norm, const at::Tensor& hidden, bool required) {
  if (!required && !present(norm[0])) return;
  check_floats("parameters", norm[0], hidden, {hidden.size(1)});
  if (present(norm[1])) check_floats("parameters", norm[1], hidden, {hidden.size(1)});
}

void check_parameters(const at::Tensor& hidden, at::TensorList parameters, const LayerSettings& s) {
  const int64_t size = hidden.size(1);
  TORCH_CHECK_VALUE(s.projections == 1 || s.projections == 3, "projections: got ", s.projections,
                    ", allowed: 1 or 3");
  TORCH_CHECK_VALUE(s.inner_projections == 1 || s.inner_projections == 2, "inner_projections: got ",
                    s.inner_projections, ", allowed: 1 or 2");
  const size_t count = LayerParameters::count(s.projections, s.inner_projections);
  TORCH_CHECK_VALUE(parameters.size() == count, "parameters: got ", parameters.size(),
                    " tensors, allowed: ", count);
  const LayerParameters p = s.parameters(parameters);
  check_linear(p.qkv, s.projections, size, 3 * size, hidden);
  if (s.projections == 3) {
    for (int i = 0; i < 3; ++i) check_floats("parameters", p.qkv[i], hidden, {size, size});
  }
  check_linear(p.projection, 1, size, size, hidden);
  check_norm(p.first_norm, hidden, !s.pre_norm);
  const int64_t inner = check_linear(p.inner, s.inner_projections, size, -1, hidden);
  const bool gated = is_gated(s.activation);
  TORCH_CHECK_VALUE(gated ? inner % 2 == 0 : s.inner_projections == 1, "inner_projections: got ",
                    s.inner_projections, " and ", inner, " rows with the activation '",
                    s.activation, "', allowed: 1, or an even number of rows if it is gated");
  check_linear(p.outer, 1, gated ? inner / 2 : inner, size, hidden);
  check_norm(p.second_norm, hidden, true);
}

void check_layer(const at::Tensor& hidden, at::TensorList parameters, const LayerSettings& s) {
  check_matrix("hidden", hidden);
  check_floats("hidden", hidden, hidden, {hidden.size(0), hidden.size(1)});
  const int64_t size = hidden.size(1);
  TORCH_CHECK_VALUE(s.heads >= 1 && size % s.heads == 0, "heads: got ", s.heads,
                    ", allowed: a divisor of ", size, ", the number of columns of hidden");
  check_parameters(hidden, parameters, s);
  check_eps(s.eps);
  activation_of(s.activation,
                {Activation::gelu, Activation::gelu_tanh, Activation::relu, Activation::silu,
                 Activation::geglu, Activation::geglu_tanh, Activation::swiglu});
  check_result_dtype(s.dtype);
  TORCH_CHECK_VALUE(s.window >= -1, "window: got ", s.window,
                    ", allowed: at least -1, where -1 sets no limit");
  TORCH_CHECK_VALUE(s.rotation.empty() || s.rotation.size() == 2, "rotation: got ",
                    s.rotation.size(), " tensors, allowed: 2, or none");
  for (const at::Tensor& angles : s.rotation) {
    check_floats("rotation", angles, hidden, {hidden.size(0), size / s.heads / 2});
  }
  check_seeds(s);
  TORCH_CHECK_VALUE(!s.pre_norm || (s.dropouts[1] == 0.0 && s.dropouts[2] == 0.0),
                    "pre_norm: got True with dropouts ", s.dropouts,
                    ", allowed: 0 for the last two");
  check_sequences(hidden, s);
}

// Returns a private copy of the indices in `chosen`, so that other threads cannot change the
// indices during the call.
OptionalTensor copied(const OptionalTensor& chosen) {
  if (!chosen) return std::nullopt;
  TORCH_CHECK_TYPE(chosen->scalar_type() == at::kLong, "chosen: got dtype ", chosen->scalar_type(),
                   ", allowed: Long");
  TORCH_CHECK_VALUE(chosen->is_cpu() && chosen->dim() == 1, "chosen: got shape ", chosen->sizes(),
                    ", allowed: (N,) on the CPU");
  return private_copy(*chosen, at::kLong);
}

// The following functions compute matrix products and their gradients.

// Returns x Wᵀ + bias in s.dtype, where W is the concatenation of the weights of `l`.
at::Tensor product_with_bias(const at::Tensor& x, const Linear& l, const LayerSettings& s) {
  if (l.weights.size() == 1) {
    return std::get<0>(
        linear_in(s.dtype, x, l.weights[0], present(l.biases[0]), std::nullopt, "none", false));
  }
  const bool biased = present(l.biases[0]).has_value();
  return parts_in(s.dtype, x, l.weights, biased ? at::TensorList(l.biases) : at::TensorList(),
                  "none");
}

// Returns x weightᵀ in s.dtype. The layer norm that follows adds the bias.
at::Tensor product_without_bias(const at::Tensor& x, const at::Tensor& weight,
                                const LayerSettings& s) {
  return std::get<0>(linear_in(s.dtype, x, weight, std::nullopt, std::nullopt, "none", false));
}

// Returns a b + addend in `dtype`. The operands a and b are rounded to s.dtype.
at::Tensor product_of(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& addend,
                      at::ScalarType dtype, const LayerSettings& s) {
  auto out = empty({a.size(0), b.size(1)}, a.options().dtype(dtype));
  matmul_into(out, s.dtype, a, b, addend);
  return out;
}

// Returns dy weight in s.dtype. This is the gradient of the input of a product with `weight`.
at::Tensor gradient_of_rows(const at::Tensor& dy, const at::Tensor& weight,
                            const LayerSettings& s) {
  return product_of(dy, weight, std::nullopt, s.dtype, s);
}

// Returns dy W + addend in fp32, where W is the concatenation of the weights of `l`. The products
// with these weights are added in order.
at::Tensor gradient_of_rows(const at::Tensor& dy, const Linear& l, const OptionalTensor& addend,
                            const LayerSettings& s) {
  at::Tensor sum;
  int64_t column = 0;
  for (const at::Tensor& weight : l.weights) {
    const auto part = dy.narrow(1, column, weight.size(0));
    if (column == 0) {
      sum = product_of(part, weight, addend, at::kFloat, s);
    } else {
      matmul_into(sum, s.dtype, part, weight, sum);
    }
    column += weight.size(0);
  }
  return sum;
}

// Writes dyᵀ x to the gradients of the weights, and the sum of the rows of dy to the gradients of
// the biases. `sums` is None, or already holds this sum.
void write_gradients(const Linear& gradients, const at::Tensor& dy, const at::Tensor& x,
                     const OptionalTensor& sums, const LayerSettings& s) {
  int64_t column = 0;
  for (size_t i = 0; i < gradients.weights.size(); ++i) {
    const int64_t length = gradients.weights[i].size(0);
    const auto part = dy.narrow(1, column, length);
    matmul_into(gradients.weights[i], s.dtype, part.t(), x, std::nullopt);
    if (present(gradients.biases[i])) {
      gradients.biases[i].copy_(sums ? sums->narrow(0, column, length) : sum_rows(part));
    }
    column += length;
  }
}

// The following functions compute attention and its gradients.

// Returns a view of projection number `part` in rows whose projections have `size` columns each.
// The view is (rows, heads, head_dim) for packed sequences and (batch, heads, length, head_dim)
// otherwise.
at::Tensor heads_of(const at::Tensor& rows, int64_t part, int64_t size, const LayerSettings& s) {
  const auto own = rows.narrow(1, part * size, size);
  const int64_t head_dim = size / s.heads;
  if (s.cu_seqlens_q) return own.unflatten(1, {s.heads, head_dim});
  return own.unflatten(0, {s.batch, s.max_seqlen_k})
      .unflatten(2, {s.heads, head_dim})
      .transpose(1, 2);
}

// Returns views of the queries, keys and values, or of their gradients. If queries were chosen,
// `queries` holds the queries, and `keys` holds keys and values. Otherwise, `keys` holds all three.
std::array<at::Tensor, 3> split_heads(const at::Tensor& queries, const at::Tensor& keys,
                                      int64_t size, const LayerSettings& s) {
  if (s.chosen) {
    return {heads_of(queries, 0, size, s), heads_of(keys, 0, size, s), heads_of(keys, 1, size, s)};
  }
  return {heads_of(keys, 0, size, s), heads_of(keys, 1, size, s), heads_of(keys, 2, size, s)};
}

// Rotates the queries and keys in place if the model has rotary embeddings. Each row of `rows`
// holds the queries, keys and values one after another.
void rotate(const at::Tensor& rows, bool inverse, const LayerSettings& s) {
  if (s.rotation.empty()) return;
  const auto heads = rows.unflatten(1, {3 * s.heads, rows.size(1) / (3 * s.heads)});
  rotate_in_place(heads, s.rotation[0], s.rotation[1], 2 * s.heads, inverse);
}

double scale_of(int64_t size, const LayerSettings& s) {
  return 1.0 / std::sqrt((double)(size / s.heads));
}

// Computes attention, and stores the projections and the output of attention in `kept`. Keys and
// values are projections of `rows`. Queries are projections of `read`, which holds the chosen rows,
// or all rows if none were chosen.
void attend(const at::Tensor& rows, const at::Tensor& read, const LayerParameters& p,
            const LayerSettings& s, at::Tensor* kept) {
  const int64_t size = rows.size(1);
  const Linear qkv(p.qkv, s.projections);
  if (s.chosen) {
    kept[kQueries] = product_with_bias(read, qkv.rows(0, size), s);
    kept[kKeys] = product_with_bias(rows, qkv.rows(size, 3 * size), s);
  } else {
    kept[kKeys] = product_with_bias(rows, qkv, s);
    rotate(kept[kKeys], false, s);
  }
  const auto [q, k, v] = split_heads(kept[kQueries], kept[kKeys], size, s);
  auto out = std::get<0>(attention_forward(
      q, k, v, std::nullopt, std::nullopt, s.cu_seqlens_q, s.cu_seqlens_k, s.seed(0),
      s.max_seqlen_q, s.max_seqlen_k, s.dropouts[0], scale_of(size, s), s.window, s.window));
  if (!s.cu_seqlens_q) out = out.transpose(1, 2);
  kept[kAttended] = out.reshape({read.size(0), size});
}

// Computes the backward of attention from `dattended`, the gradient of the attention output.
// Returns the gradient of `rows`, and writes the gradients of the projections' parameters to
// `gradients`. `dread` is another gradient, in fp32, of the rows from which the queries were
// computed; the function adds it to the result.
at::Tensor attend_backward(const at::Tensor& dattended, const OptionalTensor& dread,
                           const at::Tensor& rows, const LayerParameters& p, at::TensorList kept,
                           const Linear& gradients, const LayerSettings& s) {
  const int64_t size = rows.size(1);
  const Linear qkv(p.qkv, s.projections);
  const auto dkeys = empty(kept[kKeys].sizes(), kept[kKeys].options());
  const auto dqueries = s.chosen ? empty(kept[kQueries].sizes(), dkeys.options()) : dkeys;
  const auto [q, k, v] = split_heads(kept[kQueries], kept[kKeys], size, s);
  const auto [dq, dk, dv] = split_heads(dqueries, dkeys, size, s);
  attention_backward(dq, dk, dv, std::nullopt, heads_of(dattended, 0, size, s), q, k, v,
                     std::nullopt, std::nullopt, s.cu_seqlens_q, s.cu_seqlens_k, s.seed(0),
                     s.max_seqlen_q, s.max_seqlen_k, s.dropouts[0], scale_of(size, s), s.window,
                     s.window);
  if (!s.chosen) {
    rotate(dkeys, true, s);
    write_gradients(gradients, dkeys, rows, std::nullopt, s);
    return gradient_of_rows(dkeys, qkv, dread, s);
  }
  write_gradients(gradients.rows(0, size), dqueries, kept[kRead], std::nullopt, s);
  write_gradients(gradients.rows(size, 3 * size), dkeys, rows, std::nullopt, s);
  const auto dchosen = gradient_of_rows(dqueries, qkv.rows(0, size), dread, s);
  return gradient_of_rows(dkeys, qkv.rows(size, 3 * size),
                          scatter_rows(dchosen, *s.chosen, rows.size(0)), s);
}

// The following functions compute the feed-forward and its gradients.

// Returns the activation of the first product of the feed-forward from `rows`, and stores the
// product in `kept`.
at::Tensor activate(const at::Tensor& rows, const LayerParameters& p, const LayerSettings& s,
                    at::Tensor* kept) {
  if (is_gated(s.activation)) {
    kept[kInner] = product_with_bias(rows, Linear(p.inner, s.inner_projections), s);
    return activation_forward(kept[kInner], std::nullopt, s.activation);
  }
  auto [activated, inner] =
      linear_in(s.dtype, rows, p.inner[0], present(p.inner[1]), std::nullopt, s.activation, true);
  kept[kInner] = inner;
  return activated;
}

// Computes the backward of the feed-forward from `dy`, the gradient of its second product. Returns
// the gradient of the input `rows`, and writes the gradients of both weights and of the first bias.
// `drows` is another gradient of the input, in fp32; the function adds it to the result.
at::Tensor feed_backward(const at::Tensor& dy, const OptionalTensor& drows, const at::Tensor& rows,
                         const LayerParameters& p, at::TensorList kept, const Linear& dinner,
                         const Linear& douter, const LayerSettings& s) {
  const auto [dh, sums, activated] = activation_backward(
      gradient_of_rows(dy, p.outer[0], s), kept[kInner], std::nullopt, s.activation, true, true);
  write_gradients(dinner, dh, rows, sums, s);
  matmul_into(douter.weights[0], s.dtype, dy.t(), activated, std::nullopt);
  return gradient_of_rows(dh, Linear(p.inner, s.inner_projections), drows, s);
}

// The following functions compute the whole layer and its gradients.

// The gradients of the parameters of a layer.
struct Gradients {
  Linear qkv, projection, inner, outer;
  at::Tensor first_norm[2], second_norm[2];

  Gradients(const LayerParameters& p, const LayerSettings& s)
      : qkv(Linear(p.qkv, s.projections).empty_like()),
        projection(Linear(p.projection, 1).empty_like()),
        inner(Linear(p.inner, s.inner_projections).empty_like()),
        outer(Linear(p.outer, 1).empty_like()) {
    for (const int i : {0, 1}) {
      first_norm[i] = empty({0}, p.first_norm[i].options());
    }
  }

  // Returns dhidden and the gradients of the parameters, in the order of the parameters.
  std::vector<at::Tensor> listed(const at::Tensor& dhidden) const {
    std::vector<at::Tensor> list = {dhidden};
    qkv.append_to(list);
    projection.append_to(list);
    list.insert(list.end(), first_norm, first_norm + 2);
    inner.append_to(list);
    outer.append_to(list);
    list.insert(list.end(), second_norm, second_norm + 2);
    return list;
  }
};

void forward_post_norm(const at::Tensor& hidden, const LayerParameters& p, const LayerSettings& s,
                       std::vector<at::Tensor>& found) {
  at::Tensor *kept = &found[1], read = hidden;
  if (s.chosen) read = kept[kRead] = hidden.index_select(0, *s.chosen);
  attend(hidden, read, p, s, kept);
  kept[kProjected] = product_without_bias(kept[kAttended], p.projection[0], s);
  std::tie(kept[kMiddle], kept[kFirstMean], kept[kFirstScale]) =
      layer_norm_forward(kept[kProjected], p.first_norm[0], present(p.first_norm[1]), read,
                         present(p.projection[1]), s.seed(1), s.dropouts[1], s.eps);
  const auto activated = activate(kept[kMiddle], p, s, kept);
  kept[kOuter] = product_without_bias(activated, p.outer[0], s);
  std::tie(found[0], kept[kSecondMean], kept[kSecondScale]) =
      layer_norm_forward(kept[kOuter], p.second_norm[0], present(p.second_norm[1]), kept[kMiddle],
                         present(p.outer[1]), s.seed(2), s.dropouts[2], s.eps);
}

at::Tensor backward_post_norm(const at::Tensor& dy, const at::Tensor& hidden,
                              const LayerParameters& p, at::TensorList kept, Gradients& g,
                              const LayerSettings& s) {
  // Computes the backward of a layer norm. Returns the gradients of the residual and of the product
  // that is added to the residual. Without dropout, both are the same tensor.
  const auto norm_backward = [&](const at::Tensor& dy_of, Kept x, Kept mean, Kept rstd,
                                 const at::Tensor* norm, const at::Tensor& residual,
                                 const at::Tensor& bias, size_t dropout, at::Tensor* dnorm,
                                 at::Tensor& dbias) {
    at::Tensor dsum, dx;
    std::tie(dsum, dx, dnorm[0], dnorm[1], dbias) = layer_norm_backward(
        dy_of, kept[x], norm[0], kept[mean], kept[rstd], residual, present(bias), s.seed(dropout),
        present(norm[1]).has_value(), s.dropouts[dropout]);
    return std::pair(dsum, s.dropouts[dropout] == 0.0 ? dsum : dx);
  };
  const auto [dmiddle_sum, dfed] =
      norm_backward(dy, kOuter, kSecondMean, kSecondScale, p.second_norm, kept[kMiddle], p.outer[1],
                    2, g.second_norm, g.outer.biases[0]);
  const auto dmiddle =
      feed_backward(dfed, dmiddle_sum, kept[kMiddle], p, kept, g.inner, g.outer, s);
  const auto& read = s.chosen ? kept[kRead] : hidden;
  const auto [dread, dprojected] =
      norm_backward(dmiddle, kProjected, kFirstMean, kFirstScale, p.first_norm, read,
                    p.projection[1], 1, g.first_norm, g.projection.biases[0]);
  matmul_into(g.projection.weights[0], s.dtype, dprojected.t(), kept[kAttended], std::nullopt);
  return attend_backward(gradient_of_rows(dprojected, p.projection[0], s), dread, hidden, p, kept,
                         g.qkv, s);
}

// Runs the forward of a layer whose norms come before attention and before the feed-forward. The
// norm before attention may be absent.
void forward_pre_norm(const at::Tensor& hidden, const LayerParameters& p, const LayerSettings& s,
                      std::vector<at::Tensor>& found) {
  at::Tensor *kept = &found[1], rows = hidden;
  const auto norm = [&](const at::Tensor& x, const at::Tensor* parameters, Kept y, Kept mean,
                        Kept rstd) {
    std::tie(kept[y], kept[mean], kept[rstd]) =
        layer_norm_forward(x, parameters[0], present(parameters[1]), std::nullopt, std::nullopt,
                           std::nullopt, 0.0, s.eps);
    return kept[y];
  };
  if (present(p.first_norm[0])) rows = norm(hidden, p.first_norm, kFirst, kFirstMean, kFirstScale);
  attend(rows, rows, p, s, kept);
  kept[kMiddle] = product_and_sum(s.dtype, kept[kAttended], p.projection, hidden);
  const auto second = norm(kept[kMiddle], p.second_norm, kSecond, kSecondMean, kSecondScale);
  found[0] = product_and_sum(s.dtype, activate(second, p, s, kept), p.outer, kept[kMiddle]);
}

at::Tensor backward_pre_norm(const at::Tensor& dy_in, const at::Tensor& hidden,
                             const LayerParameters& p, at::TensorList kept, Gradients& g,
                             const LayerSettings& s) {
  // Computes the backward of a norm from `dy`, the gradient of the norm's result. Returns the sum
  // of the gradient of the norm's input x and `dresidual`, which is the gradient of the residual
  // connection around the norm. dy is rounded to the dtype of products, because products read the
  // result of the norm.
  const auto norm_backward = [&](const at::Tensor& dy, const at::Tensor& x, Kept mean, Kept rstd,
                                 const at::Tensor* norm, const at::Tensor& dresidual,
                                 at::Tensor* dnorm) {
    at::Tensor dsum;
    std::tie(dsum, std::ignore, dnorm[0], dnorm[1], std::ignore) = layer_norm_backward(
        rounded_to(dy, s.dtype), x, norm[0], kept[mean], kept[rstd], std::nullopt, std::nullopt,
        std::nullopt, present(norm[1]).has_value(), 0.0);
    return sum_of(dresidual, dsum);
  };
  const auto write_bias = [&](const Linear& gradient, const at::Tensor& dy) {
    if (present(gradient.biases[0])) gradient.biases[0].copy_(sum_rows(dy));
  };
  const auto dy = dy_in.contiguous(), dfed = rounded_to(dy, s.dtype);
  write_bias(g.outer, dfed);
  const auto dsecond =
      feed_backward(dfed, std::nullopt, kept[kSecond], p, kept, g.inner, g.outer, s);
  const auto dmiddle = norm_backward(dsecond, kept[kMiddle], kSecondMean, kSecondScale,
                                     p.second_norm, dy, g.second_norm);
  const auto dprojected = rounded_to(dmiddle, s.dtype);
  write_gradients(g.projection, dprojected, kept[kAttended], std::nullopt, s);
  const auto dattended = gradient_of_rows(dprojected, p.projection[0], s);
  const bool first = present(p.first_norm[0]).has_value();
  const auto& rows = first ? kept[kFirst] : hidden;
  const auto dfirst = attend_backward(dattended, std::nullopt, rows, p, kept, g.qkv, s);
  return first ? norm_backward(dfirst, hidden, kFirstMean, kFirstScale, p.first_norm, dmiddle,
                               g.first_norm)
               : sum_of(dmiddle, rounded_to(dfirst, s.dtype));
}

// The shape and the dtype of a tensor that the forward stores for the backward. kept_forms returns
// the forms of all such tensors, indexed by Kept. A tensor that the layer does not need has the
// shape (0,).
struct KeptForm {
  std::vector<int64_t> shape;
  at::ScalarType dtype;
};

std::array<KeptForm, kCount> kept_forms(const at::Tensor& hidden, at::TensorList parameters,
                                        const LayerSettings& s) {
  const int64_t total = hidden.size(0), size = hidden.size(1);
  const int64_t rows = s.chosen ? s.chosen->numel() : total;
  const LayerParameters p = s.parameters(parameters);
  const int64_t inner = p.outer->size(1) * (is_gated(s.activation) ? 2 : 1);
  const bool first = !s.pre_norm || present(p.first_norm[0]);
  std::array<KeptForm, kCount> forms;
  const auto set = [&](Kept i, bool exists, std::vector<int64_t> shape, at::ScalarType dtype) {
    forms[i] = {exists ? std::move(shape) : std::vector<int64_t>{0}, dtype};
  };
  set(kKeys, true, {total, (s.chosen ? 2 : 3) * size}, s.dtype);
  set(kAttended, true, {rows, size}, s.dtype);
  set(kProjected, !s.pre_norm, {rows, size}, s.dtype);
  set(kFirstMean, first, {rows}, at::kFloat);
  set(kFirstScale, first, {rows}, at::kFloat);
  set(kMiddle, true, {rows, size}, at::kFloat);
  set(kInner, true, {rows, inner}, s.dtype);
  set(kOuter, !s.pre_norm, {rows, size}, s.dtype);
  set(kSecondMean, true, {rows}, at::kFloat);
  set(kSecondScale, true, {rows}, at::kFloat);
  set(kQueries, s.chosen.has_value(), {rows, size}, s.dtype);
  set(kRead, s.chosen.has_value(), {rows, size}, at::kFloat);
  set(kFirst, s.pre_norm && first, {rows, size}, at::kFloat);
  set(kSecond, s.pre_norm, {rows, size}, at::kFloat);
  return forms;
}

void check_kept(const at::Tensor& dy, const at::Tensor& hidden, at::TensorList parameters,
                at::TensorList kept, const LayerSettings& s) {
  const int64_t rows = s.chosen ? s.chosen->numel() : hidden.size(0);
  check_floats("dy", dy, hidden, {rows, hidden.size(1)});
  TORCH_CHECK_VALUE(kept.size() == kCount, "kept: got ", kept.size(),
                    " tensors, allowed: ", (int64_t)kCount);
  const auto forms = kept_forms(hidden, parameters, s);
  for (size_t i = 0; i < kCount; ++i) {
    check_device("kept", kept[i], hidden);
    TORCH_CHECK_VALUE(kept[i].sizes() == at::IntArrayRef(forms[i].shape), "kept: got shape ",
                      kept[i].sizes(), " at ", i, ", allowed: ", text_of(forms[i].shape));
    TORCH_CHECK_TYPE(kept[i].scalar_type() == forms[i].dtype, "kept: got dtype ",
                     kept[i].scalar_type(), " at ", i, ", allowed: ", forms[i].dtype);
  }
}

}  // namespace

at::Tensor sum_rows(const at::Tensor& x_in) {
  check_matrix("x", x_in);
  const auto x = fastbert::with_unit_columns(x_in);
  const int64_t rows = x.size(0), columns = x.size(1);
  auto sum = empty({columns}, x.options().dtype(at::kFloat));
  const int64_t starts[] = {0, rows}, target = 0;
  const SegmentSums params = {
      format_of(x), Format::f32, columns, x.const_data_ptr(),     x.stride(0),
      nullptr,      starts,      &target, sum.mutable_data_ptr(), columns};
  const Kernels& k = kernels();
  parallel_for((columns + kStripColumns - 1) / kStripColumns, grain_rows(kStripColumns * rows + 1),
               [&](int64_t begin, int64_t end) { k.sum_segments(params, begin, end); });
  return sum;
}

std::vector<at::Tensor> layer_forward(const at::Tensor& hidden, at::TensorList parameters,
                                      const OptionalTensor& chosen_in,
                                      const OptionalTensor& cu_seqlens_q,
                                      const OptionalTensor& cu_seqlens_k, at::TensorList seeds,
                                      at::TensorList rotation, at::ArrayRef<double> dropouts,
                                      int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t batch,
                                      int64_t heads, int64_t projections, int64_t inner_projections,
                                      int64_t window, bool pre_norm, double eps,
                                      const std::string& activation, at::ScalarType dtype) {
  const OptionalTensor chosen = copied(chosen_in);
  const LayerSettings s = {
      chosen,       cu_seqlens_q, cu_seqlens_k, seeds,      rotation,    dropouts,
      max_seqlen_q, max_seqlen_k, batch,        heads,      projections, inner_projections,
      window,       pre_norm,     eps,          activation, dtype};
  check_layer(hidden, parameters, s);
  std::vector<at::Tensor> found(1 + kCount);
  const auto forms = kept_forms(hidden, parameters, s);
  for (size_t i = 0; i < kCount; ++i) {
    found[1 + i] = empty({0}, hidden.options().dtype(forms[i].dtype));
  }
  const auto run = [&] {
    const LayerParameters p = s.parameters(parameters);
    pre_norm ? forward_pre_norm(hidden, p, s, found) : forward_post_norm(hidden, p, s, found);
  };
  worth_a_team(hidden.size(0), parameters) ? together(run) : run();
  return found;
}

std::vector<at::Tensor> layer_backward(
    const at::Tensor& dy, const at::Tensor& hidden, at::TensorList parameters, at::TensorList kept,
    const OptionalTensor& chosen_in, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, at::TensorList seeds, at::TensorList rotation,
    at::ArrayRef<double> dropouts, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t batch,
    int64_t heads, int64_t projections, int64_t inner_projections, int64_t window, bool pre_norm,
    double eps, const std::string& activation, at::ScalarType dtype) {
  const OptionalTensor chosen = copied(chosen_in);
  const LayerSettings s = {
      chosen,       cu_seqlens_q, cu_seqlens_k, seeds,      rotation,    dropouts,
      max_seqlen_q, max_seqlen_k, batch,        heads,      projections, inner_projections,
      window,       pre_norm,     eps,          activation, dtype};
  check_layer(hidden, parameters, s);
  check_kept(dy, hidden, parameters, kept, s);
  const LayerParameters p = s.parameters(parameters);
  Gradients gradients(p, s);
  at::Tensor dhidden;
  const auto run = [&] {
    dhidden = pre_norm ? backward_pre_norm(dy, hidden, p, kept, gradients, s)
                       : backward_post_norm(dy, hidden, p, kept, gradients, s);
  };
  worth_a_team(hidden.size(0), parameters) ? together(run) : run();
  return gradients.listed(dhidden);
}

}  // namespace fastbert::cpu
