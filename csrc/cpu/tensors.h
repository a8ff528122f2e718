// New tensors. ATen declares these functions in headers that take a compiler longer to read than
// the rest of an operator's file to compile; here they cost it nothing.

#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace fastbert::cpu {

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);
at::Tensor empty_like(const at::Tensor& like);
at::Tensor zeros(at::IntArrayRef sizes, const at::TensorOptions& options);

// Bytes that `release` gives back with the last reference to them.
at::Tensor from_memory(void* data, int64_t bytes, const std::function<void(void*)>& release);

}  // namespace fastbert::cpu
