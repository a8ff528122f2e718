// Activations on the CPU. The operators check tensors and divide the rows among threads.

#include <string>
#include <tuple>

#include "../isa/dispatch.h"
#include "../layer_parameters.h"
#include "../operands.h"
#include "../operators.h"

namespace fastbert::cpu {
namespace {

Activation row_activation(const std::string& name) {
  return activation_of(name,
                       {Activation::gelu, Activation::gelu_tanh, Activation::relu, Activation::silu,
                        Activation::geglu, Activation::geglu_tanh, Activation::swiglu});
}

// Checks the arguments of an activation, and returns the number of columns of its result.
int64_t check_activation(const at::Tensor& h, const OptionalTensor& bias, Activation activation) {
  check_pre_activation(h, bias);
  if (!is_gated(kActivationNames[(size_t)activation])) return h.size(1);
  TORCH_CHECK_VALUE(h.size(1) % 2 == 0, "h: got shape ", h.sizes(),
                    ", allowed: an even number of columns for a gated activation");
  return h.size(1) / 2;
}

}  // namespace

at::Tensor activation_forward(const at::Tensor& h_in, const OptionalTensor& bias_in,
                              const std::string& name) {
  const Activation activation = row_activation(name);
  const int64_t columns = check_activation(h_in, bias_in, activation);
  const auto h = fastbert::with_unit_columns(h_in);
  const auto bias = as_float(bias_in);
  const int64_t rows = h.size(0);
  auto y = empty({rows, columns}, h.options());
  const ActivationForward params = {format_of(h), activation,   columns,
                                    matrix(h),    floats(bias), y.mutable_data_ptr()};
  const Kernels& k = kernels();
  parallel_for(rows, grain_rows(columns),
               [&](int64_t begin, int64_t end) { k.activation_forward(params, begin, end); });
  return y;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> activation_backward(const at::Tensor& dy_in,
                                                                   const at::Tensor& h_in,
                                                                   const OptionalTensor& bias_in,
                                                                   const std::string& name,
                                                                   bool sum_rows, bool recompute) {
  const Activation activation = row_activation(name);
  const int64_t columns = check_activation(h_in, bias_in, activation);
  check_device("dy", dy_in, h_in);
  check_dtype_of("dy", dy_in, h_in.scalar_type(), "h");
  const int64_t rows = h_in.size(0), width = h_in.size(1);
  check_shape("dy", dy_in, {rows, columns});
  const auto dy = fastbert::with_unit_columns(dy_in), h = fastbert::with_unit_columns(h_in);
  const auto bias = as_float(bias_in);
  auto dh = empty({rows, width}, h.options());
  auto a = recompute ? empty({rows, columns}, h.options()) : empty({0}, h.options());
  const ActivationBackward params = {format_of(h),
                                     activation,
                                     columns,
                                     matrix(dy),
                                     matrix(h),
                                     floats(bias),
                                     dh.mutable_data_ptr(),
                                     recompute ? a.mutable_data_ptr() : nullptr};
  const Kernels& k = kernels();
  if (!sum_rows) {
    parallel_for(rows, grain_rows(width), [&](int64_t begin, int64_t end) {
      k.activation_backward(params, begin, end, nullptr);
    });
    return {dh, empty({0}, h.options()), a};
  }
  const auto dbias =
      sum_by_chunks(k, rows, width, width, [&](int64_t begin, int64_t end, double* partial) {
        k.activation_backward(params, begin, end, partial);
      });
  return {dh, bias_in ? dbias.to(bias_in->scalar_type()) : dbias, a};
}

}  // namespace fastbert::cpu
