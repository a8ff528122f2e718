// The schemas of the C++ operators and their implementations for the CPU. cuda/cuda_ops.cpp
// registers the implementations for CUDA. fastbert/ops registers the public operators with their
// gradients.
//
// To keep compile times short, only this file among the CPU operators includes the large headers of
// torch, and it allocates new tensors for the other files. A result that a call does not compute is
// an empty tensor, for example dx without dropout, or dbias if the layer has no bias.

#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "../register.h"
#include "recycling.h"
#include "tensors.h"

TORCH_LIBRARY(fastbert_C, m) {
  m.def(
      "layer_norm_forward(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? x_bias, "
      "Tensor? seed, float dropout_p, float eps) -> (Tensor y, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, "
      "Tensor? residual, Tensor? x_bias, Tensor? seed, bool has_bias, float dropout_p) "
      "-> (Tensor dsum, Tensor dx, Tensor dweight, Tensor dbias, Tensor dx_bias)");
  m.def("activation_forward(Tensor h, Tensor? bias, str activation) -> Tensor");
  m.def(
      "activation_backward(Tensor dy, Tensor h, Tensor? bias, str activation, bool sum_rows, "
      "bool recompute) -> (Tensor dh, Tensor dbias, Tensor a)");
  m.def(
      "rms_norm_forward(Tensor x, Tensor weight, Tensor? residual, float eps) "
      "-> (Tensor y, Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, Tensor? residual) "
      "-> (Tensor dsum, Tensor dweight)");
  m.def("rotary(Tensor x, Tensor cos, Tensor sin, int heads, bool inverse) -> Tensor");
  m.def(
      "embedding_forward(Tensor ids, Tensor? token_types, Tensor? positions, Tensor word_table, "
      "Tensor? type_table, Tensor? position_table, Tensor weight, Tensor? bias, Tensor? seed, "
      "float eps, float dropout_p) -> (Tensor y, Tensor mean, Tensor rstd)");
  m.def(
      "embedding_backward(Tensor dy, Tensor ids, Tensor? token_types, Tensor? positions, "
      "Tensor word_table, Tensor? type_table, Tensor? position_table, Tensor weight, Tensor mean, "
      "Tensor rstd, Tensor? seed, bool has_bias, float dropout_p, int padding_idx) "
      "-> (Tensor dword, Tensor dtype, Tensor dposition, Tensor dweight, Tensor dbias)");
  m.def(
      "linear_cross_entropy_forward(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, "
      "int ignore_index, str reduction) -> (Tensor loss, Tensor statistics, Tensor order)");
  m.def(
      "linear_cross_entropy_backward(Tensor dloss, Tensor hidden, Tensor weight, Tensor? bias, "
      "Tensor labels, Tensor statistics, Tensor order, str reduction) "
      "-> (Tensor dhidden, Tensor dweight, Tensor dbias)");
  m.def(
      "splade_forward(Tensor hidden, Tensor weight, Tensor? bias, Tensor cu_seqlens, bool save) "
      "-> (Tensor y, Tensor logits, Tensor rows)");
  m.def(
      "splade_backward(Tensor dy, Tensor hidden, Tensor weight, Tensor? bias, Tensor logits, "
      "Tensor rows) -> (Tensor dhidden, Tensor dweight, Tensor dbias)");
  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str activation, bool save) "
      "-> (Tensor y, Tensor h)");
  m.def("linear_of_parts(Tensor x, Tensor[] weights, Tensor[] biases, str activation) -> Tensor");
  m.def(
      "linear_layer_norm(Tensor x, Tensor weight, Tensor? bias, Tensor residual, "
      "Tensor norm_weight, Tensor norm_bias, float eps) -> Tensor");
  m.def(
      "feed_forward_layer_norm(Tensor x, Tensor inner, Tensor? inner_bias, Tensor outer, "
      "Tensor? outer_bias, Tensor residual, Tensor norm_weight, Tensor norm_bias, str activation, "
      "float eps) -> Tensor");
  m.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, int max_seqlen_q, "
      "int max_seqlen_k, float dropout_p, float scale, int left, int right) "
      "-> (Tensor out, Tensor lse)");
  m.def(
      "attention_backward(Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dbias, "
      "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, int max_seqlen_q, "
      "int max_seqlen_k, float dropout_p, float scale, int left, int right) -> ()");
  m.def(
      "attention_weights(Tensor q, Tensor k, Tensor? mask, Tensor? bias, Tensor? cu_seqlens_q, "
      "Tensor? cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, int[]? heads, int[]? rows, "
      "float scale, int left, int right) -> Tensor");
  m.def("relative_attention_forward(Tensor q, Tensor k, Tensor v, " FASTBERT_RELATIVE_SCHEMA
        ") -> Tensor");
  m.def("relative_attention_weights(Tensor q, Tensor k, " FASTBERT_RELATIVE_SCHEMA ") -> Tensor");
  m.def(
      "relative_attention_backward(Tensor dout, Tensor q, Tensor k, "
      "Tensor v, " FASTBERT_RELATIVE_SCHEMA
      ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dkeys, Tensor dqueries, Tensor dbias, "
      "Tensor dsegment_scores)");
  m.def("matmul(Tensor a, Tensor b, Tensor? addend, ScalarType dtype) -> Tensor");
  m.def(
      "int8_linear(Tensor x, Tensor packed, Tensor scale, Tensor column_sum, int n, Tensor? bias, "
      "Tensor? residual, str activation, ScalarType dtype) -> Tensor");
  m.def("int8_layout() -> (int lanes, int group)");
  m.def(
      "encoder(Tensor hidden, Tensor[] parameters, Tensor[] scales, Tensor? cu_seqlens, "
      "Tensor? mask, Tensor? bias, Tensor[] rotations, int[] windows, Tensor[] positions, "
      "float? scale, int batch, int max_seqlen, int heads, int key_value_heads, int projections, "
      "int inner_projections, bool pre_norm, bool rms_norm, float eps, str activation, "
      "ScalarType dtype, bool all_states) -> Tensor[]");
  m.def(
      "bert(Tensor ids, Tensor? mask, Tensor? token_types, Tensor? cu_seqlens, "
      "Tensor[] embedding, Tensor[] parameters, Tensor[] scales, Tensor[] pooler, "
      "int? first_position, int heads, int projections, float embedding_eps, float eps, "
      "str activation, ScalarType dtype) -> (Tensor[] tensors, int longest)");
  m.def(
      "decoder_step(Tensor hidden, Tensor[] parameters, Tensor(a!) cache, Tensor slots, "
      "int position, Tensor source_cache, Tensor cu_seqlens, Tensor sources, int heads, "
      "bool pre_norm, float eps, str activation) -> Tensor");
  m.def("sum_rows(Tensor x) -> Tensor");
  m.def(
      "layer_forward(Tensor hidden, Tensor[] parameters, Tensor? chosen, Tensor? cu_seqlens_q, "
      "Tensor? cu_seqlens_k, Tensor[] seeds, Tensor[] rotation, float[] dropouts, "
      "int max_seqlen_q, int max_seqlen_k, int batch, int heads, int projections, "
      "int inner_projections, int window, bool pre_norm, float eps, str activation, "
      "ScalarType dtype) -> Tensor[]");
  m.def(
      "layer_backward(Tensor dy, Tensor hidden, Tensor[] parameters, Tensor[] kept, "
      "Tensor? chosen, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor[] seeds, "
      "Tensor[] rotation, float[] dropouts, int max_seqlen_q, int max_seqlen_k, int batch, "
      "int heads, int projections, int inner_projections, int window, bool pre_norm, float eps, "
      "str activation, ScalarType dtype) -> Tensor[]");
  m.def("use_huge_pages(Tensor[] weights) -> ()");
  m.def("same_bytes(Tensor[] a, Tensor[] b) -> bool");
  m.def("any_outside(Tensor index, int size, int? ignored) -> bool");
  m.def("unpad_indices(Tensor mask) -> (Tensor indices, Tensor cu_seqlens, int max_seqlen)");
  m.def("scatter_rows(Tensor values, Tensor indices, int rows) -> Tensor");
}

namespace fastbert::cpu {

// Allocates a tensor without torch's dispatcher, because a call through the dispatcher would take
// longer than the allocation.
at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const int64_t bytes = c10::multiply_integers(sizes) * (int64_t)options.dtype().itemsize();
  if (c10::Allocator* allocator = Recycling::allocator((size_t)bytes)) {
    constexpr auto kKeys = c10::DispatchKeySet(c10::DispatchKey::CPU);
    return at::detail::empty_generic(sizes, allocator, kKeys, dtype, std::nullopt);
  }
  return at::detail::empty_cpu(sizes, options);
}

at::Tensor strided(const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides,
                   int64_t first) {
  return at::native::as_strided_tensorimpl(t, sizes, strides, t.storage_offset() + first);
}

at::Tensor empty_like(const at::Tensor& like) { return at::empty_like(like); }

at::Tensor zeros(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::zeros(sizes, options);
}

TORCH_LIBRARY_IMPL(fastbert_C, CPU, m) {
  implement<layer_norm_forward>(m, "layer_norm_forward");
  implement<layer_norm_backward>(m, "layer_norm_backward");
  implement<activation_forward>(m, "activation_forward");
  implement<activation_backward>(m, "activation_backward");
  implement<rms_norm_forward>(m, "rms_norm_forward");
  implement<rms_norm_backward>(m, "rms_norm_backward");
  implement<rotary>(m, "rotary");
  implement<embedding_forward>(m, "embedding_forward");
  implement<embedding_backward>(m, "embedding_backward");
  implement<linear_cross_entropy_forward>(m, "linear_cross_entropy_forward");
  implement<linear_cross_entropy_backward>(m, "linear_cross_entropy_backward");
  implement<splade_forward>(m, "splade_forward");
  implement<splade_backward>(m, "splade_backward");
  implement<linear>(m, "linear");
  implement<linear_of_parts>(m, "linear_of_parts");
  implement<linear_layer_norm>(m, "linear_layer_norm");
  implement<feed_forward_layer_norm>(m, "feed_forward_layer_norm");
  implement<attention_forward>(m, "attention_forward");
  implement<attention_backward>(m, "attention_backward");
  implement<attention_weights>(m, "attention_weights");
  implement<relative_attention_forward>(m, "relative_attention_forward");
  implement<relative_attention_weights>(m, "relative_attention_weights");
  implement<relative_attention_backward>(m, "relative_attention_backward");
  implement<matmul>(m, "matmul");
  implement<int8_linear>(m, "int8_linear");
  implement<encoder>(m, "encoder");
  implement<bert>(m, "bert");
  implement<decoder_step>(m, "decoder_step");
  implement<sum_rows>(m, "sum_rows");
  implement<layer_forward>(m, "layer_forward");
  implement<layer_backward>(m, "layer_backward");
  implement<use_huge_pages>(m, "use_huge_pages");
  implement<same_bytes>(m, "same_bytes");
  implement<any_outside>(m, "any_outside");
  implement<unpad_indices>(m, "unpad_indices");
  implement<scatter_rows>(m, "scatter_rows");
}

TORCH_LIBRARY_IMPL(fastbert_C, CompositeExplicitAutograd, m) {
  implement<int8_layout>(m, "int8_layout");
}

// torch normally computes the pending negation or conjugation of an argument before the call of an
// operator. This fails for an operator that writes to an argument and does not return it. With the
// fallthrough registered here, such operators receive the arguments with the operation still
// pending, and the checks in register.h reject them.
TORCH_LIBRARY_IMPL(fastbert_C, Negative, m) {
  m.impl("attention_backward", torch::CppFunction::makeFallthrough());
  m.impl("decoder_step", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(fastbert_C, Conjugate, m) {
  m.impl("attention_backward", torch::CppFunction::makeFallthrough());
  m.impl("decoder_step", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(fastbert_C, ZeroTensor, m) {
  m.impl("attention_backward", torch::CppFunction::makeFallthrough());
  m.impl("decoder_step", torch::CppFunction::makeFallthrough());
}

}  // namespace fastbert::cpu
