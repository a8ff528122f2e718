// The input contract of the C++ operators, the same on both devices.
//
// Violations raise ValueError or TypeError in Python; the message names the argument, what was got
// and what is allowed.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>
#include <string>

namespace fastbert {

using OptionalTensor = std::optional<at::Tensor>;

inline void check_device(const char* name, const at::Tensor& t, const at::Tensor& like) {
  TORCH_CHECK_VALUE(t.device() == like.device(), name, ": got a tensor on ", t.device(),
                    ", allowed: the device of the first argument, ", like.device());
}

inline void check_dtype(const char* name, const at::Tensor& t) {
  const auto dtype = t.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, name,
                   ": got dtype ", dtype, ", allowed: Float, BFloat16, Half");
}

// The operand that sets shape, dtype and device for the others: (rows, columns).
inline void check_matrix(const char* name, const at::Tensor& t) {
  check_dtype(name, t);
  TORCH_CHECK_VALUE(t.dim() == 2 && t.size(1) >= 1, name, ": got shape ", t.sizes(),
                    ", allowed: (rows, columns) with columns >= 1");
}

inline void check_same(const char* name, const at::Tensor& t, const at::Tensor& like) {
  check_device(name, t, like);
  TORCH_CHECK_TYPE(t.scalar_type() == like.scalar_type(), name, ": got dtype ", t.scalar_type(),
                   ", allowed: ", like.scalar_type(), ", that of the other matrices");
  TORCH_CHECK_VALUE(t.sizes() == like.sizes(), name, ": got shape ", t.sizes(),
                    ", allowed: ", like.sizes());
}

// A vector as long as a row of `like`, in any floating dtype.
inline void check_parameter(const char* name, const at::Tensor& t, const at::Tensor& like) {
  check_device(name, t, like);
  TORCH_CHECK_TYPE(at::isFloatingType(t.scalar_type()), name, ": got dtype ", t.scalar_type(),
                   ", allowed: a floating dtype");
  TORCH_CHECK_VALUE(t.dim() == 1 && t.size(0) == like.size(1), name, ": got shape ", t.sizes(),
                    ", allowed: (", like.size(1), ",)");
}

// What the forward pass stored for each row of `like`.
inline void check_statistic(const char* name, const at::Tensor& t, const at::Tensor& like) {
  check_device(name, t, like);
  TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat, name, ": got dtype ", t.scalar_type(),
                   ", allowed: Float");
  TORCH_CHECK_VALUE(t.dim() == 1 && t.size(0) == like.size(0), name, ": got shape ", t.sizes(),
                    ", allowed: (", like.size(0), ",)");
}

inline void check_dropout(double p, const OptionalTensor& seed, const at::Tensor& like) {
  TORCH_CHECK_VALUE(p >= 0.0 && p <= 1.0, "dropout_p: got ", p, ", allowed: 0 <= p <= 1");
  if (p == 0.0) return;
  TORCH_CHECK_VALUE(seed.has_value(), "seed: got None with dropout_p = ", p,
                    ", allowed: an int64 tensor of shape (1,)");
  check_device("seed", *seed, like);
  TORCH_CHECK_TYPE(seed->scalar_type() == at::kLong, "seed: got dtype ", seed->scalar_type(),
                   ", allowed: Long");
  TORCH_CHECK_VALUE(seed->numel() == 1, "seed: got shape ", seed->sizes(), ", allowed: (1,)");
}

inline void check_layer_norm(const at::Tensor& x, const at::Tensor& weight,
                             const OptionalTensor& residual, const OptionalTensor& x_bias,
                             const OptionalTensor& seed, double dropout_p) {
  check_matrix("x", x);
  check_parameter("weight", weight, x);
  if (residual) check_same("residual", *residual, x);
  if (x_bias) check_parameter("x_bias", *x_bias, x);
  check_dropout(dropout_p, seed, x);
}

inline void check_layer_norm_forward(const at::Tensor& x, const at::Tensor& weight,
                                     const at::Tensor& bias, const OptionalTensor& residual,
                                     const OptionalTensor& x_bias, const OptionalTensor& seed,
                                     double dropout_p, double eps) {
  check_layer_norm(x, weight, residual, x_bias, seed, dropout_p);
  check_parameter("bias", bias, x);
  TORCH_CHECK_VALUE(eps >= 0.0, "eps: got ", eps, ", allowed: eps >= 0");
}

inline void check_layer_norm_backward(const at::Tensor& dy, const at::Tensor& x,
                                      const at::Tensor& weight, const at::Tensor& mean,
                                      const at::Tensor& rstd, const OptionalTensor& residual,
                                      const OptionalTensor& x_bias, const OptionalTensor& seed,
                                      double dropout_p) {
  check_layer_norm(x, weight, residual, x_bias, seed, dropout_p);
  check_same("dy", dy, x);
  check_statistic("mean", mean, x);
  check_statistic("rstd", rstd, x);
}

inline void check_bias_gelu(const at::Tensor& h, const OptionalTensor& bias) {
  check_matrix("h", h);
  if (bias) check_parameter("bias", *bias, h);
}

// Whether the tanh form of GELU is asked for.
inline bool check_approximate(const std::string& approximate) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh", "approximate: got '",
                    approximate, "', allowed: 'none', 'tanh'");
  return approximate == "tanh";
}

// Numbers that a kernel indexes with, contiguous, in memory that no other thread can write: what
// was checked is what is used. `contiguous()` and `to()` alone may return the tensor itself.
inline at::Tensor private_copy(const at::Tensor& t, at::ScalarType dtype) {
  return t.to(dtype, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous);
}

// The kernels take any row stride and unit column stride; anything more exotic is copied.
inline at::Tensor with_unit_columns(const at::Tensor& t) {
  return t.size(1) == 1 || t.stride(1) == 1 ? t : t.contiguous();
}

// A parameter as the kernels read it: contiguous fp32. It is one row long, so the copy costs
// nothing.
inline at::Tensor as_float(const at::Tensor& parameter) {
  return parameter.to(at::kFloat).contiguous();
}

inline OptionalTensor as_float(const OptionalTensor& parameter) {
  return parameter ? OptionalTensor(as_float(*parameter)) : std::nullopt;
}

}  // namespace fastbert
