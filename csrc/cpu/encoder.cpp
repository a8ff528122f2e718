// A whole stack of encoder layers in one call, for inference: between the operators of a layer
// there is neither Python nor a dispatcher, and no lock is held, so that threads can run models
// side by side.

#include <torch/library.h>

#include <cmath>
#include <vector>

#include "operators.h"

namespace fastbert::cpu {
namespace {

// The parameters of a layer, in the order in which they are passed.
enum Parameter {
  kQkvWeight,
  kQkvBias,
  kProjectionWeight,
  kProjectionBias,
  kFirstNormWeight,
  kFirstNormBias,
  kInnerWeight,
  kInnerBias,
  kOuterWeight,
  kOuterBias,
  kSecondNormWeight,
  kSecondNormBias,
  kParameters
};

// How the rows are divided into sequences, and what every layer shares.
struct Stack {
  const OptionalTensor &cu_seqlens, &mask, &bias;
  int64_t batch, max_seqlen, heads;
  double eps;
  const std::string& activation;
  at::ScalarType dtype;  // of the products; the rows that go from layer to layer have their own
};

void check(const at::Tensor& hidden, at::TensorList parameters, const Stack& s) {
  check_matrix("hidden", hidden);
  TORCH_CHECK_VALUE(parameters.size() % kParameters == 0, "parameters: got ", parameters.size(),
                    " tensors, allowed: ", +kParameters, " for each layer");
  TORCH_CHECK_VALUE(s.heads >= 1 && hidden.size(1) % s.heads == 0, "heads: got ", s.heads,
                    ", allowed: a divisor of ", hidden.size(1), ", the columns of hidden");
  TORCH_CHECK_TYPE(s.dtype == hidden.scalar_type() || hidden.scalar_type() == at::kFloat,
                   "dtype: got ", s.dtype, ", allowed: ", hidden.scalar_type(),
                   ", that of hidden, or any with hidden in Float");
  if (s.cu_seqlens) {
    check_device("cu_seqlens", *s.cu_seqlens, hidden);
    TORCH_CHECK_TYPE(s.cu_seqlens->scalar_type() == at::kInt, "cu_seqlens: got dtype ",
                     s.cu_seqlens->scalar_type(), ", allowed: Int");
    TORCH_CHECK_VALUE(!s.mask && !s.bias, "mask, bias: got one with cu_seqlens, allowed: none");
  } else {
    TORCH_CHECK_VALUE(s.batch * s.max_seqlen == hidden.size(0), "hidden: got ", hidden.size(0),
                      " rows, allowed: batch * max_seqlen = ", s.batch * s.max_seqlen);
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
    const auto part = [&](int64_t i) { return view.select(2, i).transpose(1, 2); };
    out =
        std::get<0>(attention_forward(part(0), part(1), part(2), s.mask,
                                      s.bias->to(qkv.scalar_type()), std::nullopt, std::nullopt,
                                      std::nullopt, s.max_seqlen, s.max_seqlen, 0.0, scale, -1, -1))
            .transpose(1, 2);
  }
  return out.reshape({rows, qkv.size(1) / 3});
}

// The rows between the layers keep their dtype, fp32 under autocast; the products have theirs.
at::Tensor layer(const at::Tensor& hidden, const at::Tensor* p, const Stack& s) {
  auto qkv = std::get<0>(
      linear(hidden.to(s.dtype), p[kQkvWeight], p[kQkvBias], std::nullopt, "none", false));
  auto x = attention(qkv, s);
  qkv.reset();  // its memory is warm, and large enough for what comes next
  const auto middle = linear_layer_norm(x, p[kProjectionWeight], p[kProjectionBias], hidden,
                                        p[kFirstNormWeight], p[kFirstNormBias], s.eps);
  x = std::get<0>(linear(middle.to(s.dtype), p[kInnerWeight], p[kInnerBias], std::nullopt,
                         s.activation, false));
  return linear_layer_norm(x, p[kOuterWeight], p[kOuterBias], middle, p[kSecondNormWeight],
                           p[kSecondNormBias], s.eps);
}

std::vector<at::Tensor> encoder(at::Tensor hidden, at::TensorList parameters,
                                const OptionalTensor& cu_seqlens, const OptionalTensor& mask,
                                const OptionalTensor& bias, int64_t batch, int64_t max_seqlen,
                                int64_t heads, double eps, const std::string& activation,
                                at::ScalarType dtype, bool all_states) {
  const Stack stack = {cu_seqlens, mask, bias, batch, max_seqlen, heads, eps, activation, dtype};
  check(hidden, parameters, stack);
  std::vector<at::Tensor> states;
  for (size_t i = 0; i < parameters.size(); i += kParameters) {
    hidden = layer(hidden, &parameters[i], stack);
    if (all_states) states.push_back(hidden);
  }
  if (!all_states) states.push_back(hidden);
  return states;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastbert_C, CPU, m) { m.impl("encoder", encoder); }

}  // namespace fastbert::cpu
