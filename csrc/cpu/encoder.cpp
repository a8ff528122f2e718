// A whole stack of encoder layers in one call, for inference. The operators of a layer run without
// Python or a dispatcher between them. torch releases Python's global lock during the call, so
// several threads can run models at the same time.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention/operands.h"
#include "layer_parameters.h"
#include "operators.h"
#include "recycling.h"
#include "rows/sums.h"

namespace fastbert::cpu {
namespace {

// The argument `scales` has kScales tensors for each encoder layer. These constants are the indices
// of the scale of each int8 linear layer among the tensors of an encoder layer; the next index is
// that of the column sums.
constexpr size_t kQkvScale = 0, kProjectionScale = 2, kInnerScale = 4, kOuterScale = 6;
constexpr size_t kScales = 8;  // number of tensors in `scales` for a layer

// The indices of the tensors of an encoder layer in the argument `positions`, and their number.
enum { kDistanceRows, kKeyTable, kQueryTable, kRelativeTensors };

// The division of the rows into sequences, and the settings of the layers.
struct Stack {
  const OptionalTensor &cu_seqlens, &mask, &bias;
  at::TensorList rotations;  // cosines and sines for each layer, or empty
  at::IntArrayRef windows;   // largest distance between a query and a key for each layer, or empty
  at::TensorList positions;  // kRelativeTensors tensors for each layer, or empty
  std::optional<double> scale;  // of the attention logits; None for the default
  int64_t batch, max_seqlen, heads, key_value_heads;
  // The number of weight tensors of the projections to q, k and v, and the number of weight tensors
  // of the first product of the feed-forward.
  int64_t projections, inner_projections;
  bool pre_norm, rms_norm;
  double eps;
  const std::string& activation;
  at::ScalarType dtype;  // dtype of the products; hidden states keep their own dtype
};

// Returns the number of parameter tensors of a layer.
size_t parameters_of(const Stack& s) {
  return LayerParameters::count(s.projections, s.inner_projections);
}

struct Layer : LayerParameters {
  size_t number;
  const at::Tensor* scales;  // null if the weights are floating-point

  Layer(size_t i, at::TensorList parameters, at::TensorList all_scales, const Stack& s)
      : LayerParameters(&parameters[i * parameters_of(s)], s.projections, s.inner_projections),
        number(i),
        scales(all_scales.empty() ? nullptr : &all_scales[i * kScales]) {}
};

void check(const at::Tensor& hidden, at::TensorList parameters, at::TensorList scales,
           const Stack& s) {
  check_matrix("hidden", hidden);
  TORCH_CHECK_VALUE(
      s.projections >= 1 && s.projections <= 3 && (s.projections == 1 || scales.empty()),
      "projections: got ", s.projections, ", allowed: 1 to 3, and 1 with scales");
  TORCH_CHECK_VALUE(s.inner_projections >= 1 && s.inner_projections <= 2 &&
                        (s.inner_projections == 1 || scales.empty()),
                    "inner_projections: got ", s.inner_projections,
                    ", allowed: 1 or 2, and 1 with scales");
  TORCH_CHECK_VALUE(!s.pre_norm || scales.empty(),
                    "pre_norm: got True with scales, allowed: False");
  TORCH_CHECK_VALUE(s.pre_norm || !s.rms_norm,
                    "rms_norm: got True without pre_norm, allowed: False");
  const size_t count = parameters_of(s);
  TORCH_CHECK_VALUE(parameters.size() % count == 0, "parameters: got ", parameters.size(),
                    " tensors, allowed: ", count, " for each layer");
  const size_t layers = parameters.size() / count;
  TORCH_CHECK_VALUE(scales.empty() || scales.size() == layers * kScales, "scales: got ",
                    scales.size(), " tensors, allowed: none, or ", kScales, " for each of ", layers,
                    " layers");
  TORCH_CHECK_VALUE(s.rotations.empty() || s.rotations.size() == 2 * layers, "rotations: got ",
                    s.rotations.size(), " tensors, allowed: none, or 2 for each of ", layers,
                    " layers");
  TORCH_CHECK_VALUE(s.windows.empty() || s.windows.size() == layers, "windows: got ",
                    s.windows.size(), " numbers, allowed: none, or one for each of ", layers,
                    " layers");
  TORCH_CHECK_VALUE(s.positions.empty() || s.positions.size() == layers * kRelativeTensors,
                    "positions: got ", s.positions.size(), " tensors, allowed: none, or ",
                    (int)kRelativeTensors, " for each of ", layers, " layers");
  TORCH_CHECK_VALUE(s.positions.empty() || (!s.bias && s.windows.empty()),
                    "positions: got tensors with a bias or with windows, allowed: none");
  for (size_t i = 0; i < s.positions.size(); ++i) {
    const at::Tensor& table = s.positions[i];
    if (i % kRelativeTensors == kDistanceRows || table.numel() == 0) continue;
    TORCH_CHECK_VALUE(table.dim() == 2 && table.size(1) == hidden.size(1), "positions[", i,
                      "]: got shape ", table.sizes(), ", allowed: (P, ", hidden.size(1),
                      "), or no elements");
  }
  TORCH_CHECK_VALUE(s.heads >= 1, "heads: got ", s.heads, ", allowed: at least 1");
  TORCH_CHECK_VALUE(s.key_value_heads >= 1 && s.heads % s.key_value_heads == 0 &&
                        (s.key_value_heads == s.heads || scales.empty()),
                    "key_value_heads: got ", s.key_value_heads, ", allowed: a divisor of ", s.heads,
                    ", the number of heads, and ", s.heads, " with scales");
  TORCH_CHECK_TYPE(s.dtype == hidden.scalar_type() || hidden.scalar_type() == at::kFloat,
                   "dtype: got ", s.dtype, ", allowed: ", hidden.scalar_type(),
                   ", the dtype of hidden, or any of Float, BFloat16, Half if hidden is Float");
  check_result_dtype(s.dtype);
  check_eps(s.eps);
  if (!is_gated(s.activation)) epilogue_activation(s.activation);
  if (s.bias) {
    TORCH_CHECK_TYPE(at::isFloatingType(s.bias->scalar_type()), "bias: got dtype ",
                     s.bias->scalar_type(), ", allowed: a floating dtype");
  }
  if (s.cu_seqlens) {
    TORCH_CHECK_VALUE(!s.mask, "mask: got a tensor with cu_seqlens, allowed: None");
  } else {
    // The product batch * max_seqlen is not computed, because it could overflow.
    const int64_t rows = hidden.size(0);
    TORCH_CHECK_VALUE(
        s.batch >= 0 && s.max_seqlen >= 0 &&
            (s.batch == 0 ? rows == 0 : rows % s.batch == 0 && rows / s.batch == s.max_seqlen),
        "batch, max_seqlen: got ", s.batch, " and ", s.max_seqlen, ", allowed: a product of ", rows,
        ", the number of rows of hidden");
  }
}

// Returns q, k and v of all heads. In each row of `qkv`, there are fewer heads of k and of v than
// of q, and consecutive heads of q share a head of k and a head of v.
at::Tensor repeated(const at::Tensor& qkv, int64_t head_dim, const Stack& s) {
  const int64_t sharing = s.heads / s.key_value_heads;
  const at::Tensor all = empty({qkv.size(0), 3 * s.heads * head_dim}, qkv.options());
  const size_t size = (size_t)(head_dim * qkv.element_size());
  const char* from = (const char*)qkv.const_data_ptr();
  char* to = (char*)all.mutable_data_ptr();
  parallel_for(qkv.size(0), grain_rows(all.size(1)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const char* x = from + (size_t)(row * qkv.size(1)) * qkv.element_size();
      char* y = to + (size_t)(row * all.size(1)) * all.element_size();
      std::memcpy(y, x, s.heads * size);
      x += s.heads * size, y += s.heads * size;
      for (int64_t head = 0; head < 2 * s.heads; ++head) {
        std::memcpy(y + head * size, x + head / sharing * size, size);
      }
    }
  });
  return all;
}

// Computes attention of q, k and v, which follow one another in each row of `projected`. If the
// model has rotary embeddings, q and k are first rotated in place. Relative positions take no bias
// and no window.
at::Tensor attention(const at::Tensor& projected, const Layer& layer, const Stack& s) {
  const int64_t rows = projected.size(0), columns = projected.size(1);
  // The sum of more heads than columns could overflow.
  const int64_t stored_heads = s.heads > columns ? 0 : s.heads + 2 * s.key_value_heads;
  TORCH_CHECK_VALUE(stored_heads > 0 && columns % stored_heads == 0, "heads: got ", s.heads,
                    " and ", s.key_value_heads, " of keys, allowed: a divisor of ", columns,
                    ", the number of columns of q, k and v, by the heads of all three");
  const int64_t head_dim = columns / stored_heads;
  const double scale = s.scale.value_or(1.0 / std::sqrt((double)head_dim));
  if (!s.rotations.empty()) {
    const at::Tensor* rotation = &s.rotations[2 * layer.number];
    rotate_in_place(projected.view({rows, stored_heads, head_dim}), rotation[0], rotation[1],
                    s.heads + s.key_value_heads, false);
  }
  const bool grouped = s.key_value_heads < s.heads;
  const at::Tensor qkv = grouped ? repeated(projected, head_dim, s) : projected;
  if (!s.positions.empty()) {
    const at::Tensor* given = &s.positions[kRelativeTensors * layer.number];
    const auto table = [&](const at::Tensor& t) {
      return t.numel() == 0 ? std::nullopt : OptionalTensor(t.unflatten(-1, {s.heads, head_dim}));
    };
    const OptionalTensor keys = table(given[kKeyTable]), none;
    const OptionalTensor queries = table(given[kQueryTable]);
    return relative_attention_of_rows(qkv, s.heads,
                                      {given[kDistanceRows], keys, queries, none, none, none, none},
                                      s.mask, s.cu_seqlens, s.batch, s.max_seqlen, scale);
  }
  const int64_t window = s.windows.empty() ? -1 : s.windows[layer.number];
  OptionalTensor bias;
  if (s.bias) bias = s.bias->to(qkv.scalar_type());
  return attention_of_rows(qkv, s.heads, s.mask, bias, s.cu_seqlens, s.batch, s.max_seqlen, scale,
                           window, window);
}

// Returns activation(x Wᵀ + bias), where W is the concatenation of `count` weights along the
// outputs. `weights` points to these weights, and `count` biases follow the weights.
at::Tensor parts_product(const at::Tensor& x, const at::Tensor* weights, size_t count,
                         const std::string& activation, const Stack& s) {
  const at::TensorList biases(weights + count, count);
  const bool none = std::all_of(biases.begin(), biases.end(),
                                [](const at::Tensor& bias) { return bias.numel() == 0; });
  return parts_in(s.dtype, x, {weights, count}, none ? at::TensorList() : biases, activation);
}

// Returns activation(x Wᵀ + bias), where W is the int8 weight p[0] and the bias is p[1]. fp32 rows
// of x are quantised directly, without a conversion to s.dtype.
at::Tensor int8_product(const at::Tensor& x, const at::Tensor* p, const at::Tensor* scale,
                        const std::string& activation, const Stack& s) {
  return int8_linear(x, p[0], scale[0], scale[1], p[1].numel(), p[1], std::nullopt, activation,
                     s.dtype);
}

// Returns the projections of x: each row has q, k and v, one after another.
at::Tensor projections(const at::Tensor& x, const Layer& layer, const Stack& s) {
  if (layer.scales) return int8_product(x, layer.qkv, layer.scales + kQkvScale, "none", s);
  return parts_product(x, layer.qkv, s.projections, "none", s);
}

// Returns the activations between the two products of the feed-forward.
at::Tensor activations(const at::Tensor& x, const Layer& layer, const Stack& s) {
  const bool gated = is_gated(s.activation);
  const std::string activation = gated ? "none" : s.activation;
  const auto h = layer.scales
                     ? int8_product(x, layer.inner, layer.scales + kInnerScale, activation, s)
                     : parts_product(x, layer.inner, s.inner_projections, activation, s);
  return gated ? activation_forward(h, std::nullopt, s.activation) : h;
}

at::Tensor normalised(const at::Tensor& x, const OptionalTensor& residual, const at::Tensor* norm,
                      const Stack& s) {
  if (s.rms_norm) {
    TORCH_CHECK_VALUE(!present(norm[1]), "parameters: got a bias of a norm of shape ",
                      norm[1].sizes(), ", allowed: no elements with rms_norm");
    return std::get<0>(rms_norm_forward(x, norm[0], residual, s.eps));
  }
  return std::get<0>(layer_norm_forward(x, norm[0], present(norm[1]), residual, std::nullopt,
                                        std::nullopt, 0.0, s.eps));
}

// Returns the layer norm of x Wᵀ + bias + residual, where W is p[0] and the bias is p[1]. If
// `scale` is not null, W is an int8 weight.
at::Tensor product_and_norm(const at::Tensor& x, const at::Tensor* p, const at::Tensor* norm,
                            const at::Tensor& residual, const at::Tensor* scale, const Stack& s) {
  if (!scale) {
    return linear_layer_norm(x, p[0], present(p[1]), residual, norm[0], norm[1], s.eps);
  }
  const auto y = int8_product(x, p, scale, "none", s).to(residual.scalar_type());
  return normalised(y, residual, norm, s);
}

// Runs a layer with norms after attention and after the feed-forward. Hidden states keep their
// dtype from layer to layer; under autocast, this dtype is fp32. Products compute in s.dtype.
at::Tensor through(const Layer& layer, const at::Tensor& hidden, const Stack& s) {
  const auto scale = [&](size_t place) { return layer.scales ? layer.scales + place : nullptr; };
  auto x = projections(hidden, layer, s);
  x = attention(x, layer, s);
  const auto middle =
      product_and_norm(x, layer.projection, layer.first_norm, hidden, scale(kProjectionScale), s);
  if (!layer.scales && s.inner_projections == 1 && !is_gated(s.activation)) {
    return feed_forward_in(s.dtype, middle, layer.inner[0], present(layer.inner[1]), layer.outer[0],
                           present(layer.outer[1]), middle, layer.second_norm[0],
                           layer.second_norm[1], s.activation, s.eps);
  }
  x = activations(middle, layer, s);
  return product_and_norm(x, layer.outer, layer.second_norm, middle, scale(kOuterScale), s);
}

// Runs a layer with norms before attention and before the feed-forward. The first layer may have no
// norm before attention.
at::Tensor through_pre_norm(const Layer& layer, const at::Tensor& hidden, const Stack& s) {
  const bool first = layer.first_norm[0].numel() == 0;
  auto x = first ? hidden : normalised(hidden, std::nullopt, layer.first_norm, s);
  x = projections(x, layer, s);
  x = attention(x, layer, s);
  const auto middle = product_and_sum(s.dtype, x, layer.projection, hidden);
  x = activations(normalised(middle, std::nullopt, layer.second_norm, s), layer, s);
  return product_and_sum(s.dtype, x, layer.outer, middle);
}

}  // namespace

bool worth_a_team(int64_t rows, at::TensorList parameters) {
  // Below about this many multiplications, waking the threads takes more time than the threads
  // save.
  constexpr double kWorthThreads = 2e6;
  int64_t weights = 0;
  for (const at::Tensor& parameter : parameters) weights += parameter.numel();
  return (double)rows * (double)weights >= kWorthThreads;
}

std::vector<at::Tensor> encoder(at::Tensor hidden, at::TensorList parameters, at::TensorList scales,
                                const OptionalTensor& cu_seqlens, const OptionalTensor& mask,
                                const OptionalTensor& bias, at::TensorList rotations,
                                at::IntArrayRef windows, at::TensorList positions,
                                std::optional<double> scale, int64_t batch, int64_t max_seqlen,
                                int64_t heads, int64_t key_value_heads, int64_t projections,
                                int64_t inner_projections, bool pre_norm, bool rms_norm, double eps,
                                const std::string& activation, at::ScalarType dtype,
                                bool all_states) {
  OptionalTensor lengths = cu_seqlens;
  const Stack stack = {lengths,
                       mask,
                       bias,
                       rotations,
                       windows,
                       positions,
                       scale,
                       batch,
                       max_seqlen,
                       heads,
                       key_value_heads,
                       projections,
                       inner_projections,
                       pre_norm,
                       rms_norm,
                       eps,
                       activation,
                       dtype};
  check(hidden, parameters, scales, stack);
  if (lengths) {
    // All layers use one private copy of the lengths, so that other threads cannot change the
    // lengths between two layers.
    lengths = checked_lengths("cu_seqlens", *cu_seqlens, hidden.size(0), "max_seqlen", max_seqlen);
  }
  std::vector<at::Tensor> states;
  const size_t count = parameters.size() / parameters_of(stack);
  const auto layers = [&] {
    read_in_order(parameters);
    for (size_t i = 0; i < count; ++i) {
      const Layer layer(i, parameters, scales, stack);
      try {
        hidden = pre_norm ? through_pre_norm(layer, hidden, stack) : through(layer, hidden, stack);
      } catch (c10::Error& error) {
        // The error message of an operator names the operator's own arguments. The number of the
        // layer is added, so that the user can find the argument in `parameters`.
        error.add_context("in layer " + std::to_string(i) + " of parameters" +
                          (scales.empty() ? "" : " and scales"));
        throw;
      }
      if (all_states) states.push_back(hidden);
    }
  };
  const Recycling recycling;
  if (worth_a_team(hidden.size(0), parameters)) {
    together(layers);
  } else {
    layers();
  }
  if (!all_states) states.push_back(hidden);
  return states;
}

}  // namespace fastbert::cpu
