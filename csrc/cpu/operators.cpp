// The one file of the CPU operators that reads the large headers of torch: it registers the
// operators and makes new tensors.

#include "operators.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "../register.h"
#include "tensors.h"

namespace fastbert::cpu {

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty(sizes, options);
}

at::Tensor empty_like(const at::Tensor& like) { return at::empty_like(like); }

at::Tensor zeros(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::zeros(sizes, options);
}

TORCH_LIBRARY_IMPL(fastbert_C, CPU, m) {
  implement<layer_norm_forward>(m, "layer_norm_forward");
  implement<layer_norm_backward>(m, "layer_norm_backward");
  implement<bias_gelu_forward>(m, "bias_gelu_forward");
  implement<bias_gelu_backward>(m, "bias_gelu_backward");
  implement<activation_forward>(m, "activation_forward");
  implement<activation_backward>(m, "activation_backward");
  implement<rms_norm_forward>(m, "rms_norm_forward");
  implement<rms_norm_backward>(m, "rms_norm_backward");
  implement<rotary>(m, "rotary");
  implement<embedding_forward>(m, "embedding_forward");
  implement<embedding_backward>(m, "embedding_backward");
  implement<linear_cross_entropy_forward>(m, "linear_cross_entropy_forward");
  implement<linear_cross_entropy_backward>(m, "linear_cross_entropy_backward");
  implement<linear>(m, "linear");
  implement<linear_layer_norm>(m, "linear_layer_norm");
  implement<attention_forward>(m, "attention_forward");
  implement<attention_backward>(m, "attention_backward");
  implement<attention_weights>(m, "attention_weights");
  implement<matmul>(m, "matmul");
  implement<int8_linear>(m, "int8_linear");
  implement<encoder>(m, "encoder");
  implement<fingerprint>(m, "fingerprint");
  implement<has_fingerprint>(m, "has_fingerprint");
  implement<any_outside>(m, "any_outside");
  implement<unpad_indices>(m, "unpad_indices");
  implement<scatter_rows>(m, "scatter_rows");
}

TORCH_LIBRARY_IMPL(fastbert_C, CompositeExplicitAutograd, m) {
  implement<int8_layout>(m, "int8_layout");
}

// torch resolves a pending negation or conjugation before it calls an operator, but loses its way
// in one that writes to its arguments and returns nothing. This one is called with such tensors as
// they are, and refuses them.
TORCH_LIBRARY_IMPL(fastbert_C, Negative, m) {
  m.impl("attention_backward", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(fastbert_C, Conjugate, m) {
  m.impl("attention_backward", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(fastbert_C, ZeroTensor, m) {
  m.impl("attention_backward", torch::CppFunction::makeFallthrough());
}

}  // namespace fastbert::cpu
