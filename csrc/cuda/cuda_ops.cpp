// The CUDA operators, in the only file that includes the headers of both torch and the kernels. An
// operator checks its arguments, allocates the results, fills a params struct and launches on the
// current stream of the tensors' device.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>
#include <string>
#include <tuple>

#include "../checks.h"
#include "../register.h"
#include "attention.cuh"
#include "driver.cuh"
#include "feed_forward.cuh"
#include "gemm.cuh"
#include "layer_norm.cuh"
#include "varlen.cuh"

namespace fastbert::cuda {
namespace {

Format format_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kBFloat16:
      return Format::bf16;
    case at::kHalf:
      return Format::f16;
    default:
      return Format::f32;
  }
}

// Raises an exception if a launcher returned an error. The message contains the driver's name of
// the error.
void check_launch(cudaError_t error) {
  if (error == cudaSuccess) return;
  try {
    C10_CUDA_CHECK(error);
  } catch (c10::Error& raised) {
    if (const char* name = driver_name(error)) raised.add_context(name);
    throw;
  }
}

ConstMatrix matrix(const at::Tensor& t) { return {t.const_data_ptr(), t.stride(0)}; }
ConstMatrix matrix(const OptionalTensor& t) { return t ? matrix(*t) : ConstMatrix{nullptr, 0}; }

Parameter parameter(const at::Tensor& t) { return {t.const_data_ptr(), format_of(t)}; }
Parameter parameter(const OptionalTensor& t) {
  return t ? parameter(*t) : Parameter{nullptr, Format::f32};
}

OptionalTensor with_unit_columns(const OptionalTensor& t) {
  return t ? OptionalTensor(fastbert::with_unit_columns(*t)) : std::nullopt;
}

// Returns a parameter in a format that the kernels read: fp32, bf16 or fp16. A float64 parameter is
// converted to fp32.
at::Tensor readable(const at::Tensor& t) {
  const bool wide = t.scalar_type() == at::kDouble;
  return (wide ? t.to(at::kFloat) : t).contiguous();
}
OptionalTensor readable(const OptionalTensor& t) {
  return t ? OptionalTensor(readable(*t)) : std::nullopt;
}

Dropout dropout_of(double p, const OptionalTensor& seed) {
  if (p == 0.0) return {nullptr, 0, 1.0f};
  return {seed->const_data_ptr<int64_t>(), static_cast<uint32_t>(p * 16777216.0 + 0.5),
          p == 1.0 ? 0.0f : static_cast<float>(1.0 / (1.0 - p))};
}

void check_columns(const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.size(1) <= kMaxColumns, "x: got ", x.size(1),
                    " columns, allowed by the CUDA kernels: at most ", kMaxColumns);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward_op(
    const at::Tensor& x_in, const at::Tensor& weight_in, const OptionalTensor& bias_in,
    const OptionalTensor& residual_in, const OptionalTensor& x_bias_in, const OptionalTensor& seed,
    double dropout_p, double eps) {
  check_layer_norm_forward(x_in, weight_in, bias_in, residual_in, x_bias_in, seed, dropout_p, eps);
  check_columns(x_in);
  const c10::cuda::CUDAGuard guard(x_in.device());
  const auto x = fastbert::with_unit_columns(x_in);
  const auto residual = with_unit_columns(residual_in);
  const auto weight = readable(weight_in);
  const auto bias = readable(bias_in), x_bias = readable(x_bias_in);
  const int64_t rows = x.size(0), columns = x.size(1);
  auto y = at::empty({rows, columns}, x.options());
  auto mean = at::empty({rows}, x.options().dtype(at::kFloat)), rstd = at::empty_like(mean);
  const LayerNormForward params = {format_of(x),
                                   rows,
                                   columns,
                                   matrix(x),
                                   matrix(residual),
                                   parameter(weight),
                                   parameter(bias),
                                   parameter(x_bias),
                                   dropout_of(dropout_p, seed),
                                   static_cast<float>(eps),
                                   y.mutable_data_ptr(),
                                   mean.mutable_data_ptr<float>(),
                                   rstd.mutable_data_ptr<float>()};
  check_launch(layer_norm_forward(params, c10::cuda::getCurrentCUDAStream()));
  return {y, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> layer_norm_backward_op(
    const at::Tensor& dy_in, const at::Tensor& x_in, const at::Tensor& weight_in,
    const at::Tensor& mean_in, const at::Tensor& rstd_in, const OptionalTensor& residual_in,
    const OptionalTensor& x_bias_in, const OptionalTensor& seed, bool has_bias, double dropout_p) {
  check_layer_norm_backward(dy_in, x_in, weight_in, mean_in, rstd_in, residual_in, x_bias_in, seed,
                            dropout_p);
  check_columns(x_in);
  const c10::cuda::CUDAGuard guard(x_in.device());
  const auto dy = fastbert::with_unit_columns(dy_in), x = fastbert::with_unit_columns(x_in);
  const auto residual = with_unit_columns(residual_in);
  const auto weight = readable(weight_in);
  const auto x_bias = readable(x_bias_in);
  const auto mean = mean_in.contiguous(), rstd = rstd_in.contiguous();
  const int64_t rows = x.size(0), columns = x.size(1);
  auto dsum = at::empty({rows, columns}, x.options());
  auto dx = dropout_p > 0.0 ? at::empty_like(dsum) : at::empty({0}, x.options());
  auto partial = at::empty({layer_norm_partials(rows), 3, columns}, mean.options());
  auto dweight = at::empty({columns}, weight.options());
  auto dbias = at::empty({has_bias ? columns : 0}, weight.options());
  auto dx_bias = x_bias ? at::empty({columns}, x_bias->options()) : at::empty({0}, mean.options());
  const LayerNormBackward params = {format_of(x),
                                    rows,
                                    columns,
                                    matrix(dy),
                                    matrix(x),
                                    matrix(residual),
                                    parameter(weight),
                                    parameter(x_bias),
                                    mean.const_data_ptr<float>(),
                                    rstd.const_data_ptr<float>(),
                                    dropout_of(dropout_p, seed),
                                    dsum.mutable_data_ptr(),
                                    dx.mutable_data_ptr(),
                                    partial.mutable_data_ptr<float>(),
                                    dweight.mutable_data_ptr(),
                                    has_bias ? dbias.mutable_data_ptr() : nullptr,
                                    dx_bias.mutable_data_ptr()};
  check_launch(layer_norm_backward(params, c10::cuda::getCurrentCUDAStream()));
  const auto dtype = weight_in.scalar_type();
  return {dsum, dx, dweight.to(dtype), dbias.to(dtype),
          x_bias ? dx_bias.to(x_bias_in->scalar_type()) : dx_bias};
}

Activation gelu_activation(const std::string& name) {
  return activation_of(name, {Activation::gelu, Activation::gelu_tanh}, " by the CUDA kernels");
}

at::Tensor activate(Activation activation, const at::Tensor& h, const OptionalTensor& bias) {
  const int64_t rows = h.size(0), columns = h.size(1);
  auto y = at::empty({rows, columns}, h.options());
  const ActivationForward params = {format_of(h),    activation,          rows, columns, matrix(h),
                                    parameter(bias), y.mutable_data_ptr()};
  check_launch(activation_forward(params, c10::cuda::getCurrentCUDAStream()));
  return y;
}

at::Tensor activation_forward_op(const at::Tensor& h, const OptionalTensor& bias,
                                 const std::string& name) {
  const Activation activation = gelu_activation(name);
  check_pre_activation(h, bias);
  const c10::cuda::CUDAGuard guard(h.device());
  return activate(activation, fastbert::with_unit_columns(h), readable(bias));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> activation_backward_op(
    const at::Tensor& dy_in, const at::Tensor& h_in, const OptionalTensor& bias_in,
    const std::string& name, bool sum_rows, bool recompute) {
  const Activation activation = gelu_activation(name);
  check_pre_activation(h_in, bias_in);
  check_same("dy", dy_in, h_in);
  const c10::cuda::CUDAGuard guard(h_in.device());
  const auto dy = fastbert::with_unit_columns(dy_in), h = fastbert::with_unit_columns(h_in);
  const auto bias = readable(bias_in);
  const int64_t rows = h.size(0), columns = h.size(1);
  const auto fp32 = h.options().dtype(at::kFloat);
  auto dh = at::empty({rows, columns}, h.options());
  auto partial = at::empty({sum_rows ? activation_partials(rows) : 0, columns}, fp32);
  auto dbias =
      sum_rows ? at::empty({columns}, bias ? bias->options() : fp32) : at::empty({0}, h.options());
  const ActivationBackward params = {format_of(h),
                                     activation,
                                     rows,
                                     columns,
                                     matrix(dy),
                                     matrix(h),
                                     parameter(bias),
                                     dh.mutable_data_ptr(),
                                     partial.mutable_data_ptr<float>(),
                                     sum_rows ? dbias.mutable_data_ptr() : nullptr,
                                     format_of(dbias)};
  check_launch(activation_backward(params, c10::cuda::getCurrentCUDAStream()));
  auto a = recompute ? activate(activation, h, bias) : at::empty({0}, h.options());
  return {dh, sum_rows && bias ? dbias.to(bias_in->scalar_type()) : dbias, a};
}

// Returns whether the kernels can read the rows of a tensor in place, without a copy.
bool is_aligned(const at::Tensor& t) {
  bool aligned =
      t.stride(-1) == 1 && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kRowAlignment == 0;
  for (int64_t i = 0; i + 1 < t.dim(); ++i)
    aligned = aligned && (t.size(i) == 1 || t.stride(i) * t.element_size() % kRowAlignment == 0);
  return aligned;
}

// Checks an operand of a matrix product with GELU. The kernels read the operands in place, so the
// address, the row stride and the length of a row must be multiples of 16 bytes.
// fastbert/ops/fused_products.py tests this condition before it calls the operators.
void check_product_operand(const char* name, const at::Tensor& t, const at::Tensor& like,
                           int64_t rows, int64_t columns) {
  check_device(name, t, like);
  check_dtype_of(name, t, like.scalar_type(), "the first argument");
  check_shape(name, t, {rows, columns});
  const bool readable = is_aligned(t) && t.stride(0) > 0 && columns % 8 == 0;
  TORCH_CHECK_VALUE(readable, name, ": got shape ", t.sizes(), " and strides ", t.strides(),
                    ", allowed by the CUDA kernels: aligned rows of a multiple of 16 bytes");
}

void check_product(const char* name, const at::Tensor& t) {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16, name,
                   ": got dtype ", t.scalar_type(),
                   ", allowed by the CUDA kernels: Half, "
                   "BFloat16");
  TORCH_CHECK_VALUE(t.dim() == 2 && t.size(1) > 0, name, ": got shape ", t.sizes(),
                    ", allowed: (M, K), K at least 1");
}

std::tuple<at::Tensor, at::Tensor> linear_gelu_forward_op(const at::Tensor& x,
                                                          const at::Tensor& weight,
                                                          const OptionalTensor& bias,
                                                          const std::string& name, bool save) {
  const Activation activation = gelu_activation(name);
  check_product("x", x);
  const int64_t rows = x.size(0), depth = x.size(1), columns = weight.size(0);
  check_product_operand("x", x, x, rows, depth);
  check_product_operand("weight", weight, x, columns, depth);
  TORCH_CHECK_VALUE(columns % 8 == 0 && columns > 0, "weight: got ", columns,
                    " rows, allowed by the CUDA kernels: a multiple of 8");
  if (bias) {
    check_device("bias", *bias, x);
    check_dtype_of("bias", *bias, x.scalar_type(), "x");
    check_shape("bias", *bias, {columns});
    TORCH_CHECK_VALUE(is_aligned(*bias),
                      "bias: got an address or a stride, allowed by the CUDA kernels: contiguous, "
                      "at a multiple of 16 bytes");
  }
  const c10::cuda::CUDAGuard guard(x.device());
  auto y = at::empty({rows, columns}, x.options());
  auto h = save ? at::empty_like(y) : at::empty({0}, x.options());
  const LinearGelu params = {format_of(x),
                             activation,
                             rows,
                             columns,
                             depth,
                             matrix(x),
                             matrix(weight),
                             bias ? bias->const_data_ptr() : nullptr,
                             y.mutable_data_ptr(),
                             save ? h.mutable_data_ptr() : nullptr};
  check_launch(linear_gelu(params, c10::cuda::getCurrentCUDAStream()));
  return {y, h};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_gelu_gradient_op(const at::Tensor& dy,
                                                                       const at::Tensor& weight,
                                                                       const at::Tensor& h_in,
                                                                       const std::string& name,
                                                                       bool sum_rows) {
  const Activation activation = gelu_activation(name);
  check_product("dy", dy);
  const int64_t rows = dy.size(0), depth = dy.size(1), columns = weight.size(1);
  check_product_operand("dy", dy, dy, rows, depth);
  check_product_operand("weight", weight, dy, depth, columns);
  check_product_operand("h", h_in, dy, rows, columns);
  const c10::cuda::CUDAGuard guard(dy.device());
  const auto h = h_in.contiguous();
  auto dh = at::empty({rows, columns}, h.options()), a = at::empty_like(dh);
  auto partial =
      at::empty({sum_rows ? gemm_partials(rows) : 0, columns}, h.options().dtype(at::kFloat));
  auto dbias = at::empty({sum_rows ? columns : 0}, h.options());
  const LinearGeluGradient params = {format_of(dy),
                                     activation,
                                     rows,
                                     columns,
                                     depth,
                                     matrix(dy),
                                     matrix(weight),
                                     h.const_data_ptr(),
                                     dh.mutable_data_ptr(),
                                     a.mutable_data_ptr(),
                                     partial.mutable_data_ptr<float>(),
                                     sum_rows ? dbias.mutable_data_ptr() : nullptr};
  check_launch(linear_gelu_gradient(params, c10::cuda::getCurrentCUDAStream()));
  return {dh, dbias, a};
}

// The following functions belong to the operators of attention. If the kernels can access the rows
// of `t` in place, readable_rows and writable_rows return `t`. Otherwise, readable_rows returns an
// aligned copy, and writable_rows an aligned tensor without contents.

at::Tensor readable_rows(const at::Tensor& t) {
  return is_aligned(t) ? t : t.clone(at::MemoryFormat::Contiguous);
}
at::Tensor writable_rows(const at::Tensor& t) {
  return is_aligned(t) ? t : at::empty(t.sizes(), t.options());
}

// Dense tensors are (B, H, L, D), and packed tensors are (T, H, D).
HeadRows head_rows(const at::Tensor& t) {
  void* const data = const_cast<void*>(t.const_data_ptr());
  return t.dim() == 3 ? HeadRows{data, 0, t.stride(1), t.stride(0)}
                      : HeadRows{data, t.stride(0), t.stride(1), t.stride(2)};
}

void check_rows(const char* name, const at::Tensor& t, const at::Tensor& like, int64_t rows) {
  check_device(name, t, like);
  check_dtype_of(name, t, like.scalar_type(), "q");
  auto allowed = like.sizes().vec();
  allowed[like.dim() == 3 ? 0 : 2] = rows;
  TORCH_CHECK_VALUE(t.sizes() == at::IntArrayRef(allowed), name, ": got shape ", t.sizes(),
                    ", allowed: ", text_of(allowed));
}

// The checked arguments that the forward and the backward of attention have in common.
struct AttentionCall {
  at::Tensor q, k, v;
  OptionalTensor mask, cu_seqlens_q, cu_seqlens_k;
  Sequences sequences;
  AttentionMask pairs = {nullptr, 0, 0, 0, 0};
  Dropout dropout;

  AttentionCall(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in,
                const OptionalTensor& mask_in, const OptionalTensor& cu_q,
                const OptionalTensor& cu_k, const OptionalTensor& seed, int64_t max_q,
                int64_t max_k, double dropout_p, double scale) {
    const bool packed = cu_q.has_value();
    TORCH_CHECK_VALUE(cu_k.has_value() == packed, "cu_seqlens_k: got ", cu_k ? "a tensor" : "None",
                      ", allowed: as cu_seqlens_q");
    TORCH_CHECK_TYPE(q_in.scalar_type() == at::kHalf || q_in.scalar_type() == at::kBFloat16,
                     "q: got dtype ", q_in.scalar_type(),
                     ", allowed by the CUDA kernels: Half, "
                     "BFloat16");
    TORCH_CHECK_VALUE(q_in.dim() == (packed ? 3 : 4), "q: got shape ", q_in.sizes(),
                      ", allowed: ", packed ? "(T, H, D)" : "(B, H, L, D)");
    const int64_t head_dim = q_in.size(-1);
    TORCH_CHECK_VALUE(head_dim == 32 || head_dim == 64 || head_dim == 128, "q: got head dim ",
                      head_dim, ", allowed by the CUDA kernels: 32, 64, 128");
    TORCH_CHECK_VALUE(scale > 0.0, "scale: got ", scale, ", allowed by the CUDA kernels: above 0");
    const int axis = packed ? 0 : 2;
    const int64_t rows_q = q_in.size(axis), rows_k = k_in.dim() > axis ? k_in.size(axis) : 0;
    check_rows("k", k_in, q_in, rows_k);
    check_rows("v", v_in, q_in, rows_k);
    check_dropout(dropout_p, seed, q_in);
    q = readable_rows(q_in), k = readable_rows(k_in), v = readable_rows(v_in);
    if (packed) {
      for (const auto* lengths : {&cu_q, &cu_k}) {
        const char* name = lengths == &cu_q ? "cu_seqlens_q" : "cu_seqlens_k";
        check_device(name, **lengths, q_in);
        TORCH_CHECK_TYPE((*lengths)->scalar_type() == at::kInt, name, ": got dtype ",
                         (*lengths)->scalar_type(), ", allowed: Int");
        check_shape(name, **lengths, {cu_q->size(0)});
      }
      cu_seqlens_q = cu_q->contiguous(), cu_seqlens_k = cu_k->contiguous();
    }
    const int64_t batches = packed ? cu_q->size(0) - 1 : q_in.size(0);
    sequences = {static_cast<int32_t>(batches),
                 static_cast<int32_t>(q_in.size(1)),
                 static_cast<int32_t>(packed ? max_q : rows_q),
                 static_cast<int32_t>(packed ? max_k : rows_k),
                 packed ? cu_seqlens_q->const_data_ptr<int32_t>() : nullptr,
                 packed ? cu_seqlens_k->const_data_ptr<int32_t>() : nullptr,
                 rows_q,
                 rows_k};
    if (mask_in) {
      check_device("mask", *mask_in, q_in);
      TORCH_CHECK_TYPE(mask_in->scalar_type() == at::kBool, "mask: got dtype ",
                       mask_in->scalar_type(), ", allowed: Bool");
      mask = mask_in->expand({batches, q_in.size(1), max_q, max_k});
      pairs = {static_cast<const uint8_t*>(mask->const_data_ptr()), mask->stride(0),
               mask->stride(1), mask->stride(2), mask->stride(3)};
    }
    dropout = dropout_of(dropout_p, seed);
  }

  int64_t lse_stride_batch() const {
    return sequences.cu_seqlens_q ? 0 : sequences.heads * sequences.rows_q;
  }
};

// Allocates the memory for the bits of a mask of query-key pairs, and stores its address in
// `params`.
template <class Params>
at::Tensor pair_bits(Params& params, const at::Tensor& q) {
  auto bits = at::empty({attention_pair_words(params)}, q.options().dtype(at::kInt));
  params.pair_bits = static_cast<uint32_t*>(bits.mutable_data_ptr());
  return bits;
}

std::tuple<at::Tensor, at::Tensor> flash_attention_forward_op(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    const OptionalTensor& seed, int64_t max_q, int64_t max_k, double dropout_p, double scale) {
  const AttentionCall call(q, k, v, mask, cu_seqlens_q, cu_seqlens_k, seed, max_q, max_k, dropout_p,
                           scale);
  const c10::cuda::CUDAGuard guard(q.device());
  const Sequences& s = call.sequences;
  const auto fp32 = q.options().dtype(at::kFloat);
  const bool packed = cu_seqlens_q.has_value();
  auto out =
      packed ? at::empty(q.sizes(), q.options())
             : at::empty({q.size(0), q.size(2), q.size(1), q.size(3)}, q.options()).transpose(1, 2);
  auto lse = packed ? at::empty({q.size(1), q.size(0)}, fp32)
                    : at::empty({q.size(0), q.size(1), q.size(2)}, fp32);
  if (s.batches == 0) {
    out.zero_();
    lse.fill_(-std::numeric_limits<float>::infinity());
    return {out, lse};
  }
  AttentionForward params = {format_of(q),
                             static_cast<int32_t>(q.size(-1)),
                             s,
                             head_rows(call.q),
                             head_rows(call.k),
                             head_rows(call.v),
                             head_rows(out),
                             lse.mutable_data_ptr<float>(),
                             call.lse_stride_batch(),
                             s.rows_q,
                             call.pairs,
                             call.dropout,
                             static_cast<float>(scale),
                             nullptr};
  const auto bits = pair_bits(params, q);
  check_launch(attention_forward(params, c10::cuda::getCurrentCUDAStream()));
  return {out, lse};
}

void flash_attention_backward_op(const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                                 const at::Tensor& dout_in, const at::Tensor& q,
                                 const at::Tensor& k, const at::Tensor& v, const at::Tensor& out_in,
                                 const at::Tensor& lse_in, const OptionalTensor& mask,
                                 const OptionalTensor& cu_seqlens_q,
                                 const OptionalTensor& cu_seqlens_k, const OptionalTensor& seed,
                                 int64_t max_q, int64_t max_k, double dropout_p, double scale) {
  const AttentionCall call(q, k, v, mask, cu_seqlens_q, cu_seqlens_k, seed, max_q, max_k, dropout_p,
                           scale);
  const Sequences& s = call.sequences;
  for (const auto* t : {&dout_in, &out_in, &dq})
    check_rows(t == &dout_in ? "dout" : t == &out_in ? "out" : "dq", *t, q, s.rows_q);
  check_rows("dk", dk, q, s.rows_k);
  check_rows("dv", dv, q, s.rows_k);
  const c10::cuda::CUDAGuard guard(q.device());
  if (s.batches == 0) {
    for (const auto* gradient : {&dq, &dk, &dv}) gradient->zero_();
    return;
  }
  const auto dout = readable_rows(dout_in), out = readable_rows(out_in), lse = lse_in.contiguous();
  TORCH_CHECK_VALUE(lse.numel() == s.heads * (s.cu_seqlens_q ? 1 : s.batches) * s.rows_q,
                    "lse: got shape ", lse.sizes(), ", allowed: that of the forward");
  const int64_t head_dim = q.size(-1);
  const bool single = s.max_k <= kAttentionBlockKeys;
  auto delta = at::empty({single ? 0 : lse.numel()}, lse.options());
  auto dq_sums = at::empty({single ? 0 : lse.numel() * head_dim}, lse.options());
  const at::Tensor written[] = {writable_rows(dq), writable_rows(dk), writable_rows(dv)};
  AttentionBackward params = {format_of(q),
                              static_cast<int32_t>(head_dim),
                              s,
                              head_rows(call.q),
                              head_rows(call.k),
                              head_rows(call.v),
                              head_rows(out),
                              head_rows(dout),
                              lse.const_data_ptr<float>(),
                              call.lse_stride_batch(),
                              s.rows_q,
                              call.pairs,
                              call.dropout,
                              static_cast<float>(scale),
                              delta.mutable_data_ptr<float>(),
                              dq_sums.mutable_data_ptr<float>(),
                              head_rows(written[0]),
                              head_rows(written[1]),
                              head_rows(written[2]),
                              nullptr};
  const auto bits = pair_bits(params, q);
  check_launch(attention_backward(params, c10::cuda::getCurrentCUDAStream()));
  const at::Tensor* const wanted[] = {&dq, &dk, &dv};
  for (int i = 0; i < 3; ++i)
    if (!written[i].is_same(*wanted[i])) wanted[i]->copy_(written[i]);
}

// The operator that finds the positions of the tokens in a padded batch.

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> mask_places_op(const at::Tensor& mask,
                                                                          bool with_padding) {
  TORCH_CHECK_VALUE(
      mask.dim() == 2 && mask.numel() > 0 && mask.numel() <= std::numeric_limits<int32_t>::max(),
      "mask: got shape ", mask.sizes(), ", allowed: (B, L) with 1 to 2^31 - 1 places");
  const auto type = mask.scalar_type();
  TORCH_CHECK_TYPE(type == at::kBool || type == at::kInt || type == at::kLong, "mask: got dtype ",
                   type, ", allowed: Long, Int, Bool");
  const c10::cuda::CUDAGuard guard(mask.device());
  const auto int64 = mask.options().dtype(at::kLong), int32 = mask.options().dtype(at::kInt);
  auto indices = at::empty({mask.numel()}, int64);
  auto rows = at::empty({with_padding ? mask.numel() : 0}, int64);
  auto cu_seqlens = at::empty({mask.size(0) + 1}, int32), totals = at::empty({2}, int32);
  const MaskPlaces params = {mask.const_data_ptr(),
                             static_cast<int32_t>(mask.element_size()),
                             mask.size(0),
                             mask.size(1),
                             mask.stride(0),
                             mask.stride(1),
                             indices.mutable_data_ptr<int64_t>(),
                             with_padding ? rows.mutable_data_ptr<int64_t>() : nullptr,
                             cu_seqlens.mutable_data_ptr<int32_t>(),
                             totals.mutable_data_ptr<int32_t>()};
  check_launch(mask_places(params, c10::cuda::getCurrentCUDAStream()));
  return {indices, rows, cu_seqlens, totals};
}

}  // namespace

// The following operators exist only for CUDA tensors.
TORCH_LIBRARY_FRAGMENT(fastbert_C, m) {
  m.def(
      "linear_gelu_forward(Tensor x, Tensor weight, Tensor? bias, str activation, bool save) -> "
      "(Tensor y, Tensor h)");
  m.def(
      "linear_gelu_gradient(Tensor dy, Tensor weight, Tensor h, str activation, bool sum_rows) -> "
      "(Tensor dh, Tensor dbias, Tensor a)");
  m.def(
      "flash_attention_forward(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? cu_seqlens_q, "
      "Tensor? cu_seqlens_k, Tensor? seed, int max_seqlen_q, int max_seqlen_k, float dropout_p, "
      "float scale) -> (Tensor out, Tensor lse)");
  m.def(
      "flash_attention_backward(Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor dout, "
      "Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask, Tensor? cu_seqlens_q, "
      "Tensor? cu_seqlens_k, Tensor? seed, int max_seqlen_q, int max_seqlen_k, float dropout_p, "
      "float scale) -> ()");
  m.def(
      "mask_places(Tensor mask, bool with_padding) -> (Tensor indices, Tensor rows, "
      "Tensor cu_seqlens, Tensor totals)");
}

TORCH_LIBRARY_IMPL(fastbert_C, CUDA, m) {
  implement<layer_norm_forward_op>(m, "layer_norm_forward");
  implement<layer_norm_backward_op>(m, "layer_norm_backward");
  implement<activation_forward_op>(m, "activation_forward");
  implement<activation_backward_op>(m, "activation_backward");
  implement<linear_gelu_forward_op>(m, "linear_gelu_forward");
  implement<linear_gelu_gradient_op>(m, "linear_gelu_gradient");
  implement<flash_attention_forward_op>(m, "flash_attention_forward");
  implement<flash_attention_backward_op>(m, "flash_attention_backward");
  implement<mask_places_op>(m, "mask_places");
}

}  // namespace fastbert::cuda
