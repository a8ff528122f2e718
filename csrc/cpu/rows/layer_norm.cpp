// The operators of layer norm on the CPU. They check tensors and divide the rows among threads.

#include <tuple>

#include "../isa/dispatch.h"
#include "../operands.h"
#include "../operators.h"

namespace fastbert::cpu {
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward(
    const at::Tensor& x_in, const at::Tensor& weight_in, const OptionalTensor& bias_in,
    const OptionalTensor& residual_in, const OptionalTensor& x_bias_in, const OptionalTensor& seed,
    double dropout_p, double eps) {
  check_layer_norm_forward(x_in, weight_in, bias_in, residual_in, x_bias_in, seed, dropout_p, eps,
                           true);
  const auto x = fastbert::with_unit_columns(x_in);
  const auto residual = with_unit_columns(residual_in);
  const auto weight = as_float(weight_in);
  const auto bias = as_float(bias_in), x_bias = as_float(x_bias_in);
  const int64_t rows = x.size(0), columns = x.size(1);
  auto y = empty({rows, columns}, wider_of(x, residual).options());
  auto mean = empty({rows}, x.options().dtype(at::kFloat)), rstd = empty_like(mean);

  const LayerNormForward params = {format_of(y),
                                   format_of(x),
                                   columns,
                                   matrix(x),
                                   matrix(residual),
                                   floats(weight),
                                   floats(bias),
                                   floats(x_bias),
                                   dropout_of(dropout_p, seed),
                                   (float)eps,
                                   y.mutable_data_ptr(),
                                   mean.mutable_data_ptr<float>(),
                                   rstd.mutable_data_ptr<float>()};
  const Kernels& k = kernels();
  parallel_for(rows, grain_rows(columns), [&](int64_t begin, int64_t end) {
    k.layer_norm_forward(params, begin, end, row_scratch(k, columns));
  });
  return {y, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& dy_in, const at::Tensor& x_in, const at::Tensor& weight_in,
    const at::Tensor& mean_in, const at::Tensor& rstd_in, const OptionalTensor& residual_in,
    const OptionalTensor& x_bias_in, const OptionalTensor& seed, bool has_bias, double dropout_p) {
  check_layer_norm_backward(dy_in, x_in, weight_in, mean_in, rstd_in, residual_in, x_bias_in, seed,
                            dropout_p, true);
  const auto dy = fastbert::with_unit_columns(dy_in), x = fastbert::with_unit_columns(x_in);
  const auto residual = with_unit_columns(residual_in);
  const auto weight = as_float(weight_in);
  const auto x_bias = as_float(x_bias_in);
  const auto mean = mean_in.contiguous(), rstd = rstd_in.contiguous();
  const int64_t rows = x.size(0), columns = x.size(1);
  auto dsum = empty({rows, columns}, dy.options());
  auto dx = dropout_p > 0.0 ? empty({rows, columns}, x.options()) : empty({0}, x.options());

  const LayerNormBackward params = {format_of(dsum),
                                    format_of(x),
                                    columns,
                                    matrix(dy),
                                    matrix(x),
                                    matrix(residual),
                                    floats(weight),
                                    floats(x_bias),
                                    floats(mean),
                                    floats(rstd),
                                    has_bias,
                                    dropout_of(dropout_p, seed),
                                    dsum.mutable_data_ptr(),
                                    dx.mutable_data_ptr()};
  const Kernels& k = kernels();
  const int64_t sums = 1 + has_bias + x_bias.has_value();
  const auto totals = sum_by_chunks(
      k, rows, columns, sums * columns, [&](int64_t begin, int64_t end, double* partial) {
        k.layer_norm_backward(params, begin, end, row_scratch(k, columns), partial);
      });
  const auto total = [&](int64_t i, const at::Tensor& parameter) {
    return totals.narrow(0, i * columns, columns).to(parameter.scalar_type(), false, true);
  };
  return {dsum, dx, total(0, weight_in),
          has_bias ? total(1, weight_in) : empty({0}, weight_in.options()),
          x_bias ? total(sums - 1, *x_bias_in) : empty({0}, mean.options())};
}

}  // namespace fastbert::cpu
