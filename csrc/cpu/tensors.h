// Functions that create tensors for the CPU operators. Only operators.cpp includes the ATen headers
// for these functions, because compiling the headers takes longer than compiling the rest of an
// operator's file.

#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace fastbert::cpu {

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);

// Returns the view of `t` with these sizes and strides that starts at element `first` of `t`. The
// function makes the view without a call through torch's dispatcher.
at::Tensor strided(const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides,
                   int64_t first);

at::Tensor empty_like(const at::Tensor& like);
at::Tensor zeros(at::IntArrayRef sizes, const at::TensorOptions& options);

// Returns a uint8 tensor whose memory is the `bytes` bytes at `data`. `release` frees the bytes
// when no tensor refers to them any more.
at::Tensor from_memory(void* data, int64_t bytes, const std::function<void(void*)>& release);

}  // namespace fastbert::cpu
