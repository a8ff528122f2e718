// The function `implement`, which registers a C++ operator with torch. Each registered operator
// checks the memory of its tensor arguments before it runs.
//
// The storage of a tensor can be freed while the tensor keeps its shape: sharded training calls
// `weight.untyped_storage().resize_(0)` between two uses of a weight. Without the check, a kernel
// would read or write memory that no longer belongs to the tensor.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace fastbert {

// Returns the number of bytes that the storage of `t` must have to contain all elements of `t`.
inline uint64_t bytes_reached(const at::Tensor& t) {
  if (t.numel() == 0) return 0;
  int64_t last = t.storage_offset();
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  return (uint64_t)(last + 1) * t.element_size();
}

[[noreturn]] inline void refuse(const char* name, size_t position, const std::string& place,
                                const at::Tensor& t) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
      (std::string("fastbert_C::") + name).c_str(), "");
  const std::string argument = handle.schema().arguments()[position].name() + place;
  TORCH_CHECK_VALUE(t.defined(), argument, ": got None, allowed: a tensor");
  TORCH_CHECK_VALUE(!t.is_neg() && !t.is_conj() && !t._is_zerotensor(), argument,
                    ": got a tensor whose memory does not hold its values, because a negation or "
                    "another operation is pending, allowed: a tensor without a pending operation");
  TORCH_CHECK_VALUE(false, argument, ": got a storage of ", t.storage().nbytes(),
                    " bytes for the shape ", t.sizes(), ", allowed: at least ", bytes_reached(t),
                    " bytes");
}

inline bool is_readable(const at::Tensor& t) {
  return t.defined() && bytes_reached(t) <= t.storage().nbytes() && !t.is_neg() && !t.is_conj() &&
         !t._is_zerotensor();
}

// Checks the memory of the tensors in one argument of the operator `name`. An argument that
// contains no tensor always passes.
template <class T>
void check_memory(const char* name, size_t position, const T& argument) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (!is_readable(argument)) refuse(name, position, "", argument);
  } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
    if (argument && !is_readable(*argument)) refuse(name, position, "", *argument);
  } else if constexpr (std::is_same_v<T, at::TensorList>) {
    for (size_t i = 0; i < argument.size(); ++i) {
      if (is_readable(argument[i])) continue;
      refuse(name, position, "[" + std::to_string(i) + "]", argument[i]);
    }
  }
}

template <auto function>
struct Checked;

template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Checked<function> {
  static inline const char* name = nullptr;

  static Result call(Arguments... arguments) {
    size_t position = 0;
    (check_memory(name, position++, arguments), ...);
    return function(std::forward<Arguments>(arguments)...);
  }
};

// Registers `function` as the implementation of the operator `name` for the device of `library`.
template <auto function>
void implement(torch::Library& library, const char* name) {
  Checked<function>::name = name;
  library.impl(name, &Checked<function>::call);
}

}  // namespace fastbert
