// From tensors to the plain operands of kernels.h, and the threading that both nouns share.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "../checks.h"
#include "kernels.h"
#include "parallel.h"

namespace fastbert::cpu {

inline Format format_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kBFloat16:
      return Format::bf16;
    case at::kHalf:
      return Format::f16;
    default:
      return Format::f32;
  }
}

inline ConstMatrix matrix(const at::Tensor& t) { return {t.const_data_ptr(), t.stride(0)}; }

inline ConstMatrix matrix(const OptionalTensor& t) {
  return t ? matrix(*t) : ConstMatrix{nullptr, 0};
}

inline const float* floats(const OptionalTensor& t) {
  return t ? t->const_data_ptr<float>() : nullptr;
}

inline OptionalTensor with_unit_columns(const OptionalTensor& t) {
  return t ? OptionalTensor(fastbert::with_unit_columns(*t)) : std::nullopt;
}

// Below about this many elements a second thread costs more than it brings.
constexpr int64_t kGrain = 16384;

inline int64_t grain_rows(int64_t columns) { return std::max<int64_t>(1, kGrain / columns); }

// Rows are summed over (for the gradients of parameters) in chunks that depend on the shape alone,
// so that the result does not change with the number of threads.
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

}  // namespace fastbert::cpu
