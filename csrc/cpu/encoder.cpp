// A whole stack of encoder layers in one call, for inference. Between the operators of a layer
// there is neither Python nor a dispatcher. torch releases Python's global lock during the call, so
// threads can run models side by side.

#include <cmath>
#include <vector>

#include "attention/operands.h"
#include "operators.h"

namespace fastbert::cpu {
namespace {

// The place of a linear layer's first tensor in each list of its encoder layer, if one projection
// computes q, k and v. `parameters` holds the weight, then the bias; `scales` holds an int8
// weight's scale, then its column sums.
struct Place {
  size_t parameters, scales;
};

constexpr Place kQkv = {0, 0}, kProjection = {2, 2}, kInner = {6, 4}, kOuter = {8, 6};
constexpr size_t kFirstNorm = 4, kSecondNorm = 10;  // weight, then bias
constexpr size_t kParameters = 12, kScales = 8;

// The division of the rows into sequences, and the settings that every layer shares.
struct Stack {
  const OptionalTensor &cu_seqlens, &mask, &bias;
  int64_t batch, max_seqlen, heads;
  int64_t projections;  // linear layers that compute q, k and v
  double eps;
  const std::string& activation;
  at::ScalarType dtype;  // of the products; hidden states keep their own dtype
};

struct Layer {
  const at::Tensor* qkv;         // the weights of the projections, then their biases
  const at::Tensor* parameters;  // the tensors at their places for one projection
  const at::Tensor* scales;      // null if the weights are floating
};

// The number of parameters of a layer.
size_t parameters_of(const Stack& s) { return kParameters + 2 * ((size_t)s.projections - 1); }

void check(const at::Tensor& hidden, at::TensorList parameters, at::TensorList scales,
           const Stack& s) {
  check_matrix("hidden", hidden);
  TORCH_CHECK_VALUE(
      s.projections >= 1 && s.projections <= 3 && (s.projections == 1 || scales.empty()),
      "projections: got ", s.projections, ", allowed: 1 to 3, and 1 with scales");
  const size_t count = parameters_of(s);
  TORCH_CHECK_VALUE(parameters.size() % count == 0, "parameters: got ", parameters.size(),
                    " tensors, allowed: ", count, " for each layer");
  const size_t layers = parameters.size() / count;
  TORCH_CHECK_VALUE(scales.empty() || scales.size() == layers * kScales, "scales: got ",
                    scales.size(), " tensors, allowed: none, or ", kScales, " for each of ", layers,
                    " layers");
  TORCH_CHECK_VALUE(s.heads >= 1 && hidden.size(1) % s.heads == 0, "heads: got ", s.heads,
                    ", allowed: a divisor of ", hidden.size(1),
                    ", the number of columns of hidden");
  TORCH_CHECK_TYPE(s.dtype == hidden.scalar_type() || hidden.scalar_type() == at::kFloat,
                   "dtype: got ", s.dtype, ", allowed: ", hidden.scalar_type(),
                   ", the dtype of hidden, or any of Float, BFloat16, Half if hidden is Float");
  check_result_dtype(s.dtype);
  check_eps(s.eps);
  epilogue_activation(s.activation);
  if (s.bias) {
    TORCH_CHECK_TYPE(at::isFloatingType(s.bias->scalar_type()), "bias: got dtype ",
                     s.bias->scalar_type(), ", allowed: a floating dtype");
  }
  if (s.cu_seqlens) {
    TORCH_CHECK_VALUE(!s.mask, "mask: got a tensor with cu_seqlens, allowed: None");
  } else {
    // batch * max_seqlen could overflow and is not formed.
    const int64_t rows = hidden.size(0);
    TORCH_CHECK_VALUE(
        s.batch >= 0 && s.max_seqlen >= 0 &&
            (s.batch == 0 ? rows == 0 : rows % s.batch == 0 && rows / s.batch == s.max_seqlen),
        "batch, max_seqlen: got ", s.batch, " and ", s.max_seqlen, ", allowed: a product of ", rows,
        ", the number of rows of hidden");
  }
}

at::Tensor attention(const at::Tensor& qkv, const Stack& s) {
  const int64_t rows = qkv.size(0), head_dim = qkv.size(1) / (3 * s.heads);
  const double scale = 1.0 / std::sqrt((double)head_dim);
  const auto view = s.cu_seqlens ? qkv.view({rows, 3, s.heads, head_dim})
                                 : qkv.view({s.batch, s.max_seqlen, 3, s.heads, head_dim});
  at::Tensor out;
  if (!s.bias) {
    out = attention_qkvpacked(view, s.mask, s.cu_seqlens, s.max_seqlen, scale);
  } else {
    // (rows, heads, head_dim) of packed sequences, otherwise (batch, heads, length, head_dim)
    const auto part = [&](int64_t i) {
      return s.cu_seqlens ? view.select(1, i) : view.select(2, i).transpose(1, 2);
    };
    out = std::get<0>(attention_forward(
        part(0), part(1), part(2), s.mask, s.bias->to(qkv.scalar_type()), s.cu_seqlens,
        s.cu_seqlens, std::nullopt, s.max_seqlen, s.max_seqlen, 0.0, scale, -1, -1));
    if (!s.cu_seqlens) out = out.transpose(1, 2);
  }
  return out.reshape({rows, qkv.size(1) / 3});
}

// Returns activation(x Wᵀ + bias). An int8 product quantises fp32 rows without a conversion to
// `dtype`.
at::Tensor product(const at::Tensor& x, const Layer& layer, Place place,
                   const std::string& activation, const Stack& s) {
  const at::Tensor *p = layer.parameters + place.parameters, &weight = p[0], &bias = p[1];
  if (!layer.scales) {
    return std::get<0>(linear(x.to(s.dtype), weight, bias, std::nullopt, activation, false));
  }
  const at::Tensor *q = layer.scales + place.scales, &scale = q[0], &column_sum = q[1];
  return int8_linear(x, weight, scale, column_sum, bias.numel(), bias, std::nullopt, activation,
                     s.dtype);
}

// Returns q, k and v side by side.
at::Tensor projections(const at::Tensor& x, const Layer& layer, const Stack& s) {
  if (layer.scales) return product(x, layer, kQkv, "none", s);
  const size_t count = s.projections;
  return linear_of_parts(x.to(s.dtype), {layer.qkv, count}, {layer.qkv + count, count}, "none");
}

// Returns LN(x Wᵀ + bias + residual).
at::Tensor product_and_norm(const at::Tensor& x, const Layer& layer, Place place, size_t norm,
                            const at::Tensor& residual, const Stack& s) {
  const at::Tensor *p = layer.parameters + place.parameters, *n = layer.parameters + norm;
  if (!layer.scales) return linear_layer_norm(x, p[0], p[1], residual, n[0], n[1], s.eps);
  const auto y = product(x, layer, place, "none", s).to(residual.scalar_type());
  return std::get<0>(
      layer_norm_forward(y, n[0], n[1], residual, std::nullopt, std::nullopt, 0.0, s.eps));
}

// Hidden states keep their dtype from layer to layer, which is fp32 under autocast. Products
// compute in `dtype`.
at::Tensor through(const Layer& layer, const at::Tensor& hidden, const Stack& s) {
  auto qkv = projections(hidden, layer, s);
  auto x = attention(qkv, s);
  qkv.reset();  // frees memory that is in the cache and large enough for the next result
  const auto middle = product_and_norm(x, layer, kProjection, kFirstNorm, hidden, s);
  x = product(middle, layer, kInner, s.activation, s);
  return product_and_norm(x, layer, kOuter, kSecondNorm, middle, s);
}

}  // namespace

bool worth_a_team(int64_t rows, at::TensorList parameters) {
  // Below about this many multiplications, waking the threads costs more time than they save.
  constexpr double kWorthThreads = 2e6;
  int64_t weights = 0;
  for (const at::Tensor& parameter : parameters) weights += parameter.numel();
  return (double)rows * (double)weights >= kWorthThreads;
}

std::vector<at::Tensor> encoder(at::Tensor hidden, at::TensorList parameters, at::TensorList scales,
                                const OptionalTensor& cu_seqlens, const OptionalTensor& mask,
                                const OptionalTensor& bias, int64_t batch, int64_t max_seqlen,
                                int64_t heads, int64_t projections, double eps,
                                const std::string& activation, at::ScalarType dtype,
                                bool all_states) {
  OptionalTensor lengths = cu_seqlens;
  const Stack stack = {lengths, mask,        bias, batch,      max_seqlen,
                       heads,   projections, eps,  activation, dtype};
  check(hidden, parameters, scales, stack);
  if (lengths) {
    // All layers read one private copy, so other threads cannot change the sequences between two
    // layers.
    lengths = checked_lengths("cu_seqlens", *cu_seqlens, hidden.size(0), "max_seqlen", max_seqlen);
  }
  std::vector<at::Tensor> states;
  const size_t count = parameters_of(stack);
  const auto layers = [&] {
    for (size_t i = 0; i < parameters.size() / count; ++i) {
      const at::Tensor* first = &parameters[i * count];
      const Layer layer = {first, first + (count - kParameters),
                           scales.empty() ? nullptr : &scales[i * kScales]};
      try {
        hidden = through(layer, hidden, stack);
      } catch (c10::Error& error) {
        // The message of an operator names the operator's own arguments, so the layer is added.
        error.add_context("in layer " + std::to_string(i) + " of parameters" +
                          (scales.empty() ? "" : " and scales"));
        throw;
      }
      if (all_states) states.push_back(hidden);
    }
  };
  if (worth_a_team(hidden.size(0), parameters)) {
    together(layers);
  } else {
    layers();
  }
  if (!all_states) states.push_back(hidden);
  return states;
}

}  // namespace fastbert::cpu
