// The operators of RMS norm on the CPU. They check tensors and divide the rows among threads.

#include <tuple>

#include "../isa/dispatch.h"
#include "../operands.h"

namespace fastbert::cpu {
namespace {

void check_rms_norm(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& residual) {
  check_matrix("x", x);
  check_parameter("weight", weight, x);
  if (residual) check_same("residual", *residual, x);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& x_in,
                                                    const at::Tensor& weight_in,
                                                    const OptionalTensor& residual_in, double eps) {
  check_rms_norm(x_in, weight_in, residual_in);
  check_eps(eps);
  const auto x = fastbert::with_unit_columns(x_in);
  const auto residual = with_unit_columns(residual_in);
  const auto weight = as_float(weight_in);
  const int64_t rows = x.size(0), columns = x.size(1);
  auto y = empty({rows, columns}, x.options());
  auto rstd = empty({rows}, x.options().dtype(at::kFloat));
  const RmsNormForward params = {format_of(x),
                                 columns,
                                 matrix(x),
                                 matrix(residual),
                                 floats(weight),
                                 (float)eps,
                                 y.mutable_data_ptr(),
                                 rstd.mutable_data_ptr<float>()};
  const Kernels& k = kernels();
  parallel_for(rows, grain_rows(columns), [&](int64_t begin, int64_t end) {
    k.rms_norm_forward(params, begin, end, row_scratch(k, columns));
  });
  return {y, rstd};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& dy_in,
                                                     const at::Tensor& x_in,
                                                     const at::Tensor& weight_in,
                                                     const at::Tensor& rstd_in,
                                                     const OptionalTensor& residual_in) {
  check_rms_norm(x_in, weight_in, residual_in);
  check_same("dy", dy_in, x_in);
  check_statistic("rstd", rstd_in, x_in);
  const auto dy = fastbert::with_unit_columns(dy_in), x = fastbert::with_unit_columns(x_in);
  const auto residual = with_unit_columns(residual_in);
  const auto weight = as_float(weight_in);
  const auto rstd = rstd_in.contiguous();
  const int64_t rows = x.size(0), columns = x.size(1);
  auto dsum = empty({rows, columns}, x.options());
  const RmsNormBackward params = {
      format_of(x),     columns,        matrix(dy),   matrix(x),
      matrix(residual), floats(weight), floats(rstd), dsum.mutable_data_ptr()};
  const Kernels& k = kernels();
  const auto dweight =
      sum_by_chunks(k, rows, columns, columns, [&](int64_t begin, int64_t end, double* partial) {
        k.rms_norm_backward(params, begin, end, row_scratch(k, columns), partial);
      });
  return {dsum, dweight.to(weight_in.scalar_type())};
}

}  // namespace fastbert::cpu
