// The one file of the CPU operators that reads the large headers of torch: it registers the
// operators and makes new tensors.

#include "operators.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

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
  m.impl("layer_norm_forward", layer_norm_forward);
  m.impl("layer_norm_backward", layer_norm_backward);
  m.impl("bias_gelu_forward", bias_gelu_forward);
  m.impl("bias_gelu_backward", bias_gelu_backward);
  m.impl("activation_forward", activation_forward);
  m.impl("activation_backward", activation_backward);
  m.impl("rms_norm_forward", rms_norm_forward);
  m.impl("rms_norm_backward", rms_norm_backward);
  m.impl("rotary", rotary);
  m.impl("embedding_forward", embedding_forward);
  m.impl("embedding_backward", embedding_backward);
  m.impl("linear_cross_entropy_forward", linear_cross_entropy_forward);
  m.impl("linear_cross_entropy_backward", linear_cross_entropy_backward);
  m.impl("linear", linear);
  m.impl("linear_layer_norm", linear_layer_norm);
  m.impl("attention_forward", attention_forward);
  m.impl("attention_backward", attention_backward);
  m.impl("attention_weights", attention_weights);
  m.impl("matmul", matmul);
  m.impl("int8_linear", int8_linear);
  m.impl("encoder", encoder);
  m.impl("fingerprint", fingerprint);
  m.impl("has_fingerprint", has_fingerprint);
  m.impl("any_outside", any_outside);
  m.impl("unpad_indices", unpad_indices);
  m.impl("scatter_rows", scatter_rows);
}

TORCH_LIBRARY_IMPL(fastbert_C, CompositeExplicitAutograd, m) { m.impl("int8_layout", int8_layout); }

}  // namespace fastbert::cpu
