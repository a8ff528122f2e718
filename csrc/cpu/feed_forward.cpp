// gelu(h + bias) and its gradients on the CPU: tensors in, rows shared out to threads.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <string>
#include <tuple>

#include "isa.h"
#include "operands.h"

namespace fastbert::cpu {
namespace {

Gelu gelu_of(const std::string& approximate) {
  return check_approximate(approximate) ? Gelu::tanh : Gelu::erf;
}

at::Tensor bias_gelu_forward(const at::Tensor& h_in, const OptionalTensor& bias_in,
                             const std::string& approximate) {
  check_bias_gelu(h_in, bias_in);
  const auto h = fastbert::with_unit_columns(h_in);
  const auto bias = as_float(bias_in);
  const int64_t rows = h.size(0), columns = h.size(1);
  auto y = at::empty({rows, columns}, h.options());
  const BiasGeluForward params = {format_of(h), gelu_of(approximate), columns,
                                  matrix(h),    floats(bias),         y.mutable_data_ptr()};
  const Kernels& k = kernels();
  parallel_for(rows, grain_rows(columns),
               [&](int64_t begin, int64_t end) { k.bias_gelu_forward(params, begin, end); });
  return y;
}

std::tuple<at::Tensor, at::Tensor> bias_gelu_backward(const at::Tensor& dy_in,
                                                      const at::Tensor& h_in,
                                                      const OptionalTensor& bias_in,
                                                      const std::string& approximate) {
  check_bias_gelu(h_in, bias_in);
  check_same("dy", dy_in, h_in);
  const auto dy = fastbert::with_unit_columns(dy_in), h = fastbert::with_unit_columns(h_in);
  const auto bias = as_float(bias_in);
  const int64_t rows = h.size(0), columns = h.size(1);
  auto dh = at::empty({rows, columns}, h.options());
  const BiasGeluBackward params = {
      format_of(h), gelu_of(approximate), columns, matrix(dy), matrix(h),
      floats(bias), dh.mutable_data_ptr()};
  const Kernels& k = kernels();
  const Chunks chunks(rows, columns);
  auto partials = at::zeros({bias ? chunks.count : 0, columns}, h.options().dtype(at::kDouble));
  double* partial = partials.mutable_data_ptr<double>();
  chunks.for_each([&](int64_t chunk, int64_t begin, int64_t end) {
    k.bias_gelu_backward(params, begin, end, bias ? partial + chunk * columns : nullptr);
  });
  if (!bias) return {dh, at::empty({0}, h.options())};
  auto dbias = at::empty({columns}, h.options().dtype(at::kFloat));
  k.sum_rows(partial, chunks.count, columns, dbias.mutable_data_ptr<float>());
  return {dh, dbias.to(bias_in->scalar_type())};
}

}  // namespace

TORCH_LIBRARY_IMPL(fastbert_C, CPU, m) {
  m.impl("bias_gelu_forward", bias_gelu_forward);
  m.impl("bias_gelu_backward", bias_gelu_backward);
}

}  // namespace fastbert::cpu
