// The CUDA operators, in the only file that includes both torch and the kernels. An operator checks
// its arguments, allocates the results, fills a params struct and launches on the current stream of
// the tensors' device.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <string>
#include <tuple>

#include "../checks.h"
#include "../register.h"
#include "feed_forward.cuh"
#include "layer_norm.cuh"

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

ConstMatrix matrix(const at::Tensor& t) { return {t.const_data_ptr(), t.stride(0)}; }
ConstMatrix matrix(const OptionalTensor& t) { return t ? matrix(*t) : ConstMatrix{nullptr, 0}; }

Parameter parameter(const at::Tensor& t) { return {t.const_data_ptr(), format_of(t)}; }
Parameter parameter(const OptionalTensor& t) {
  return t ? parameter(*t) : Parameter{nullptr, Format::f32};
}

OptionalTensor with_unit_columns(const OptionalTensor& t) {
  return t ? OptionalTensor(fastbert::with_unit_columns(*t)) : std::nullopt;
}

// The kernels read fp32, bf16 and fp16 parameters as they are; float64 parameters become fp32.
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
  C10_CUDA_CHECK(layer_norm_forward(params, c10::cuda::getCurrentCUDAStream()));
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
  C10_CUDA_CHECK(layer_norm_backward(params, c10::cuda::getCurrentCUDAStream()));
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
  C10_CUDA_CHECK(activation_forward(params, c10::cuda::getCurrentCUDAStream()));
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
  C10_CUDA_CHECK(activation_backward(params, c10::cuda::getCurrentCUDAStream()));
  auto a = recompute ? activate(activation, h, bias) : at::empty({0}, h.options());
  return {dh, sum_rows && bias ? dbias.to(bias_in->scalar_type()) : dbias, a};
}

}  // namespace

TORCH_LIBRARY_IMPL(fastbert_C, CUDA, m) {
  implement<layer_norm_forward_op>(m, "layer_norm_forward");
  implement<layer_norm_backward_op>(m, "layer_norm_backward");
  implement<activation_forward_op>(m, "activation_forward");
  implement<activation_backward_op>(m, "activation_backward");
}

}  // namespace fastbert::cuda
