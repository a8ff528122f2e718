// Functions that create tensors for the CPU operators. Only operators.cpp includes the ATen headers
// for these functions, because compiling the headers takes longer than compiling the rest of an
// operator's file.

#pragma once

#include <ATen/core/Tensor.h>

namespace fastbert::cpu {

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);

// Returns the view of `t` with these sizes and strides that starts at element `first` of `t`. The
// function makes the view without a call through torch's dispatcher.
at::Tensor strided(const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides,
                   int64_t first);

at::Tensor empty_like(const at::Tensor& like);
at::Tensor zeros(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace fastbert::cpu
