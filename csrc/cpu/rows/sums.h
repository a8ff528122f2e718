// Functions that add or round rows between two operators. The loops of these functions are bound by
// memory at every instruction-set level, so the functions are compiled once.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "../layer_parameters.h"
#include "../operands.h"
#include "../operators.h"

namespace fastbert::cpu {

// Calls body(zero), where the type of `zero` is the C++ type of elements in `dtype`.
template <class Body>
void with_type(at::ScalarType dtype, Body body) {
  switch (dtype) {
    case at::kBFloat16:
      return body(c10::BFloat16());
    case at::kHalf:
      return body(c10::Half());
    default:
      return body(0.0f);
  }
}

// Returns residual + rows in fp32. The residual must be fp32, and `rows` must be contiguous and may
// have any dtype.
inline at::Tensor sum_of(const at::Tensor& residual_in, const at::Tensor& rows) {
  const auto residual = residual_in.contiguous();
  auto sum = empty(residual.sizes(), residual.options());
  const float* a = residual.const_data_ptr<float>();
  float* out = sum.mutable_data_ptr<float>();
  with_type(rows.scalar_type(), [&](auto zero) {
    const auto* b = static_cast<const decltype(zero)*>(rows.const_data_ptr());
    parallel_for(sum.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) out[i] = a[i] + static_cast<float>(b[i]);
    });
  });
  return sum;
}

// Returns x Wᵀ + bias + residual in the dtype of the residual. The product is computed in `dtype`.
// linear_layer[0] is the weight, and linear_layer[1] is the bias.
inline at::Tensor product_and_sum(at::ScalarType dtype, const at::Tensor& x,
                                  const at::Tensor* linear_layer, const at::Tensor& residual) {
  const bool same = residual.scalar_type() == dtype;
  const auto y =
      std::get<0>(linear_in(dtype, x, linear_layer[0], present(linear_layer[1]),
                            same ? OptionalTensor(residual) : std::nullopt, "none", false));
  return same ? y : sum_of(residual, y);
}

// Rounds every element of `rows`, which must be contiguous fp32, to `dtype`. Returns the rounded
// elements as fp32, or `rows` itself if `dtype` is fp32.
inline at::Tensor rounded_to(const at::Tensor& rows, at::ScalarType dtype) {
  if (dtype == at::kFloat) return rows;
  auto made = empty(rows.sizes(), rows.options());
  const float* from = rows.const_data_ptr<float>();
  float* out = made.mutable_data_ptr<float>();
  with_type(dtype, [&](auto zero) {
    parallel_for(made.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        out[i] = static_cast<float>(static_cast<decltype(zero)>(from[i]));
      }
    });
  });
  return made;
}

}  // namespace fastbert::cpu
