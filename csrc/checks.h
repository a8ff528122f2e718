// Checks of the arguments that the C++ operators receive. The CPU and the CUDA operators use the
// same checks.
//
// If an argument is not allowed, a check raises ValueError or TypeError in Python. The message
// names the argument, its value and the allowed values.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "activations.h"

namespace fastbert {

using OptionalTensor = std::optional<at::Tensor>;

inline void check_device(const char* name, const at::Tensor& t, const at::Tensor& like) {
  TORCH_CHECK_VALUE(t.device() == like.device(), name, ": got a tensor on ", t.device(),
                    ", allowed: ", like.device(), ", the device of the other arguments");
}

inline bool is_storage_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

inline void check_dtype(const char* name, const at::Tensor& t) {
  TORCH_CHECK_TYPE(is_storage_dtype(t.scalar_type()), name, ": got dtype ", t.scalar_type(),
                   ", allowed: Float, BFloat16, Half");
}

// Checks that the dtype of `t` is `allowed`, which is the dtype of the argument `owner`.
inline void check_dtype_of(const char* name, const at::Tensor& t, at::ScalarType allowed,
                           const char* owner) {
  TORCH_CHECK_TYPE(t.scalar_type() == allowed, name, ": got dtype ", t.scalar_type(),
                   ", allowed: ", allowed, ", the dtype of ", owner);
}

// Checks that the dtype of `t` is `allowed`, which is the dtype of the argument `owner`, or fp32.
inline void check_dtype_or_float(const char* name, const at::Tensor& t, at::ScalarType allowed,
                                 const char* owner) {
  TORCH_CHECK_TYPE(t.scalar_type() == allowed || t.scalar_type() == at::kFloat, name,
                   ": got dtype ", t.scalar_type(), ", allowed: ", allowed, ", the dtype of ",
                   owner, ", or Float");
}

// Checks that `dtype`, which a caller requests for a result, is fp32, bf16 or fp16.
inline void check_result_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(is_storage_dtype(dtype), "dtype: got ", dtype,
                   ", allowed: Float, BFloat16, Half");
}

// Returns a shape as text in Python's notation, such as (2, 3) or (5,).
inline std::string text_of(at::IntArrayRef shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

inline void check_shape(const char* name, const at::Tensor& t,
                        std::initializer_list<int64_t> shape) {
  const at::IntArrayRef allowed(shape);
  TORCH_CHECK_VALUE(t.sizes() == allowed, name, ": got shape ", t.sizes(),
                    ", allowed: ", text_of(allowed));
}

// Checks that `t` is an fp32, bf16 or fp16 matrix of shape (rows, columns) with at least one
// column. The functions below compare the other operands with this matrix.
inline void check_matrix(const char* name, const at::Tensor& t) {
  check_dtype(name, t);
  TORCH_CHECK_VALUE(t.dim() == 2 && t.size(1) >= 1, name, ": got shape ", t.sizes(),
                    ", allowed: (rows, columns) with columns >= 1");
}

inline void check_same(const char* name, const at::Tensor& t, const at::Tensor& like) {
  check_device(name, t, like);
  check_dtype_of(name, t, like.scalar_type(), "the other matrices");
  TORCH_CHECK_VALUE(t.sizes() == like.sizes(), name, ": got shape ", t.sizes(),
                    ", allowed: ", like.sizes());
}

// Checks that `t` is a vector of `length` elements in any floating dtype, on the device of `like`.
inline void check_vector(const char* name, const at::Tensor& t, const at::Tensor& like,
                         int64_t length) {
  check_device(name, t, like);
  TORCH_CHECK_TYPE(at::isFloatingType(t.scalar_type()), name, ": got dtype ", t.scalar_type(),
                   ", allowed: a floating dtype");
  check_shape(name, t, {length});
}

// Checks that `t` is a vector with one element for each column of the matrix `like`.
inline void check_parameter(const char* name, const at::Tensor& t, const at::Tensor& like) {
  check_vector(name, t, like, like.size(1));
}

// Checks that `t` is an fp32 tensor of the shape `shape`, on the device of `like`.
inline void check_floats(const char* name, const at::Tensor& t, const at::Tensor& like,
                         std::initializer_list<int64_t> shape) {
  check_device(name, t, like);
  TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat, name, ": got dtype ", t.scalar_type(),
                   ", allowed: Float");
  check_shape(name, t, shape);
}

// Checks a statistic from the forward pass: `t` must be fp32, with one element for each row of
// `like`.
inline void check_statistic(const char* name, const at::Tensor& t, const at::Tensor& like) {
  check_floats(name, t, like, {like.size(0)});
}

// Checks that `t`, a vector of labels or row numbers, has `count` elements in int64 or int32.
inline void check_numbers(const char* name, const at::Tensor& t, const at::Tensor& like,
                          int64_t count) {
  check_device(name, t, like);
  TORCH_CHECK_TYPE(t.scalar_type() == at::kLong || t.scalar_type() == at::kInt, name,
                   ": got dtype ", t.scalar_type(), ", allowed: Long, Int");
  check_shape(name, t, {count});
}

inline void check_eps(double eps) {
  TORCH_CHECK_VALUE(eps >= 0.0, "eps: got ", eps, ", allowed: eps >= 0");
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

// Returns `residual` if it is an fp32 tensor, and otherwise `x`. The sum residual + x and the
// gradient of this sum have the dtype of the returned tensor.
inline const at::Tensor& wider_of(const at::Tensor& x, const OptionalTensor& residual) {
  return residual && residual->scalar_type() == at::kFloat ? *residual : x;
}

// Checks the arguments that the forward and the backward of layer norm have in common. If `wide` is
// true, `residual` may be fp32 although `x` has another dtype. If `wide` is false, both must have
// the same dtype.
inline void check_layer_norm(const at::Tensor& x, const at::Tensor& weight,
                             const OptionalTensor& residual, const OptionalTensor& x_bias,
                             const OptionalTensor& seed, double dropout_p, bool wide) {
  check_matrix("x", x);
  check_parameter("weight", weight, x);
  if (residual && wide && residual->scalar_type() == at::kFloat) {
    check_floats("residual", *residual, x, {x.size(0), x.size(1)});
  } else if (residual) {
    check_same("residual", *residual, x);
  }
  if (x_bias) check_parameter("x_bias", *x_bias, x);
  check_dropout(dropout_p, seed, x);
}

inline void check_layer_norm_forward(const at::Tensor& x, const at::Tensor& weight,
                                     const OptionalTensor& bias, const OptionalTensor& residual,
                                     const OptionalTensor& x_bias, const OptionalTensor& seed,
                                     double dropout_p, double eps, bool wide = false) {
  check_layer_norm(x, weight, residual, x_bias, seed, dropout_p, wide);
  if (bias) check_parameter("bias", *bias, x);
  check_eps(eps);
}

inline void check_layer_norm_backward(const at::Tensor& dy, const at::Tensor& x,
                                      const at::Tensor& weight, const at::Tensor& mean,
                                      const at::Tensor& rstd, const OptionalTensor& residual,
                                      const OptionalTensor& x_bias, const OptionalTensor& seed,
                                      double dropout_p, bool wide = false) {
  check_layer_norm(x, weight, residual, x_bias, seed, dropout_p, wide);
  check_same("dy", dy, wider_of(x, residual));
  check_statistic("mean", mean, x);
  check_statistic("rstd", rstd, x);
}

inline void check_pre_activation(const at::Tensor& h, const OptionalTensor& bias) {
  check_matrix("h", h);
  if (bias) check_parameter("bias", *bias, h);
}

// Returns the activation called `name`. Raises ValueError if this activation is not in `allowed`.
// The error message has the text `where` after the word "allowed".
inline Activation activation_of(const std::string& name, std::initializer_list<Activation> allowed,
                                const char* where = "") {
  const auto name_of = [](Activation a) { return kActivationNames[static_cast<int32_t>(a)]; };
  for (const Activation activation : allowed) {
    if (name == name_of(activation)) return activation;
  }
  std::string names;
  for (const Activation activation : allowed) {
    names += std::string(names.empty() ? "'" : ", '") + name_of(activation) + "'";
  }
  TORCH_CHECK_VALUE(false, "activation: got '", name, "', allowed", where, ": ", names);
}

// Returns a contiguous copy of `t` in `dtype`, for a kernel that uses the elements as indices. No
// other thread can write to the copy, so the indices cannot change after they were checked.
// `contiguous()`, or `to()` without `copy`, may return `t` itself.
inline at::Tensor private_copy(const at::Tensor& t, at::ScalarType dtype) {
  return t.to(dtype, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous);
}

// Returns `t` if the elements of each row are contiguous, and otherwise a contiguous copy. The
// kernels accept any row stride, but they need contiguous elements within a row.
inline at::Tensor with_unit_columns(const at::Tensor& t) {
  return t.size(1) == 1 || t.stride(1) == 1 ? t : t.contiguous();
}

// Returns a parameter in the form that the kernels read: contiguous fp32. The copy is cheap,
// because a parameter is one row long.
inline at::Tensor as_float(const at::Tensor& parameter) {
  return parameter.to(at::kFloat).contiguous();
}

inline OptionalTensor as_float(const OptionalTensor& parameter) {
  return parameter ? OptionalTensor(as_float(*parameter)) : std::nullopt;
}

}  // namespace fastbert
