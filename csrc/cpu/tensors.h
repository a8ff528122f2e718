// New tensors for the CPU operators. ATen's headers for these functions take a compiler longer than
// the rest of an operator's file, so operators.cpp alone includes them.

#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace fastbert::cpu {

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);
at::Tensor empty_like(const at::Tensor& like);
at::Tensor zeros(at::IntArrayRef sizes, const at::TensorOptions& options);

// Returns `bytes` bytes at `data`. `release` frees them with the last reference to the tensor.
at::Tensor from_memory(void* data, int64_t bytes, const std::function<void(void*)>& release);

}  // namespace fastbert::cpu
