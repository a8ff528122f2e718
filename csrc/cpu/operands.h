// The conversion of tensors to the operands of isa/kernels.h, which consist of pointers and
// strides. The file also divides rows into chunks, and provides scratch memory for rows.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <string>

#include "../checks.h"
#include "isa/kernels.h"
#include "parallel.h"
#include "tensors.h"

namespace fastbert::cpu {

inline Format format_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return Format::bf16;
    case at::kHalf:
      return Format::f16;
    default:
      return Format::f32;
  }
}

inline Format format_of(const at::Tensor& t) { return format_of(t.scalar_type()); }

inline ConstMatrix matrix(const at::Tensor& t) { return {t.const_data_ptr(), t.stride(0)}; }

inline ConstMatrix matrix(const OptionalTensor& t) {
  return t ? matrix(*t) : ConstMatrix{nullptr, 0};
}

// Returns a parameter in the form that the kernels read: contiguous fp32. A contiguous bf16
// parameter is converted here, because torch's own conversion of a short vector takes longer than
// the operator's work on the vector.
inline at::Tensor as_float(const at::Tensor& parameter) {
  if (parameter.scalar_type() != at::kBFloat16 || !parameter.is_contiguous()) {
    return fastbert::as_float(parameter);
  }
  auto made = empty(parameter.sizes(), parameter.options().dtype(at::kFloat));
  const auto* from = static_cast<const uint16_t*>(parameter.const_data_ptr());
  auto* to = static_cast<uint32_t*>(made.mutable_data_ptr());
  for (int64_t i = 0; i < parameter.numel(); ++i) to[i] = (uint32_t)from[i] << 16;
  return made;
}

inline OptionalTensor as_float(const OptionalTensor& parameter) {
  return parameter ? OptionalTensor(as_float(*parameter)) : std::nullopt;
}

inline const float* floats(const OptionalTensor& t) {
  return t ? t->const_data_ptr<float>() : nullptr;
}

inline OptionalTensor with_unit_columns(const OptionalTensor& t) {
  return t ? OptionalTensor(fastbert::with_unit_columns(*t)) : std::nullopt;
}

// Checks an operand that is added to the (m, n) result of a product. The operand must have the
// shape and the dtype of the result, and the device of `like`.
inline void check_summand(const char* name, const at::Tensor& t, const at::Tensor& like, int64_t m,
                          int64_t n, at::ScalarType dtype) {
  check_device(name, t, like);
  check_dtype_of(name, t, dtype, "the result");
  check_shape(name, t, {m, n});
}

// Below about this many elements, a second thread costs more time than it saves.
constexpr int64_t kGrain = 16384;

inline int64_t grain_rows(int64_t columns) { return std::max<int64_t>(1, kGrain / columns); }

// The division of rows into chunks. Gradients of parameters are sums over rows, and are computed as
// one partial sum for each chunk. The chunks depend on the shape alone, so the result does not
// depend on the number of threads.
struct Chunks {
  int64_t rows, rows_per_chunk, count;

  Chunks(int64_t row_count, int64_t columns) : rows(row_count) {
    constexpr int64_t kMaxChunks = 64;
    rows_per_chunk = std::max((rows + kMaxChunks - 1) / kMaxChunks, 4 * grain_rows(columns));
    count = (rows + rows_per_chunk - 1) / rows_per_chunk;
  }

  // Calls body(chunk, begin, end) for every chunk, on any thread.
  template <class Body>
  void for_each(const Body& body) const {
    parallel_for(count, 1, [&](int64_t first, int64_t last) {
      for (int64_t chunk = first; chunk < last; ++chunk) {
        const int64_t begin = chunk * rows_per_chunk;
        body(chunk, begin, std::min(rows, begin + rows_per_chunk));
      }
    });
  }
};

// Returns gradients of parameters in contiguous fp32. body(begin, end, partial) must add the
// gradients of the rows [begin, end) to the `length` partial sums of a chunk. The partial sums of
// the chunks are then added in order.
template <class Body>
at::Tensor sum_by_chunks(const Kernels& k, int64_t rows, int64_t columns, int64_t length,
                         const Body& body) {
  const Chunks chunks(rows, columns);
  auto partials = zeros({chunks.count, length}, at::dtype(at::kDouble));
  double* partial = partials.mutable_data_ptr<double>();
  chunks.for_each([&](int64_t chunk, int64_t begin, int64_t end) {
    body(begin, end, partial + chunk * length);
  });
  auto totals = empty({length}, at::dtype(at::kFloat));
  k.sum_rows(partial, chunks.count, length, totals.mutable_data_ptr<float>());
  return totals;
}

// Names the matrices among the parameters of all layers as the memory that the products read.
inline void read_in_order(at::TensorList parameters) {
  if (!leads_team()) return;
  std::vector<Memory> order;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.dim() < 2) continue;
    order.push_back({parameter.const_data_ptr(), (int64_t)parameter.nbytes()});
  }
  read_in_order(std::move(order));
}

// Returns scratch memory of the calling thread that is large enough for the norms and the embedding
// with rows of `columns` elements.
inline float* row_scratch(const Kernels& k, int64_t columns) {
  return (float*)thread_scratch(k.layer_norm_scratch(columns) * (int64_t)sizeof(float));
}

// Returns the activation called `name`. Throws ValueError if the epilogue of a product cannot apply
// this activation.
inline Activation epilogue_activation(const std::string& name) {
  return activation_of(name, {Activation::none, Activation::gelu, Activation::gelu_tanh,
                              Activation::relu, Activation::silu});
}

inline Dropout dropout_of(double p, const OptionalTensor& seed) {
  if (p == 0.0) return {};
  const uint64_t key = (uint64_t)*seed->const_data_ptr<int64_t>();
  return {true,
          {(uint32_t)key, (uint32_t)(key >> 32)},
          (uint32_t)(p * 16777216.0 + 0.5),
          p == 1.0 ? 0.0f : (float)(1.0 / (1.0 - p))};
}

}  // namespace fastbert::cpu
