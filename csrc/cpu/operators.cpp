#include "operators.h"

#include <torch/library.h>

namespace fastbert::cpu {

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
  m.impl("any_outside", any_outside);
  m.impl("unpad_indices", unpad_indices);
  m.impl("scatter_rows", scatter_rows);
}

TORCH_LIBRARY_IMPL(fastbert_C, CompositeExplicitAutograd, m) { m.impl("int8_layout", int8_layout); }

}  // namespace fastbert::cpu
