// The conversion between a padded and a packed batch: the range check of ids, the indices of the
// real tokens, and the scatter of rows to these indices. Each operator is one call into C++,
// because on a short batch, a chain of tensor operations would take longer than an encoder layer.

#include <algorithm>
#include <cstring>
#include <tuple>

#include "operands.h"

namespace fastbert::cpu {
namespace {

template <class Body>
auto with_integers(const char* name, const at::Tensor& t, const Body& body) {
  switch (t.scalar_type()) {
    case at::kLong:
      return body(t.const_data_ptr<int64_t>());
    case at::kInt:
      return body(t.const_data_ptr<int32_t>());
    default:
      TORCH_CHECK_TYPE(t.scalar_type() == at::kBool, name, ": got dtype ", t.scalar_type(),
                       ", allowed: Long, Int, Bool");
      return body(reinterpret_cast<const uint8_t*>(t.const_data_ptr<bool>()));
  }
}

}  // namespace

bool any_outside(const at::Tensor& index_in, int64_t size, std::optional<int64_t> ignored) {
  const auto index = index_in.contiguous();
  return with_integers("index", index, [&](const auto* x) {
    bool outside = false;
    for (int64_t i = 0; i < index.numel(); ++i) {
      const int64_t value = (int64_t)x[i];
      outside |= (value < 0 || value >= size) && !(ignored && value == *ignored);
    }
    return outside;
  });
}

// Takes a mask (B, L) that is nonzero for real tokens. Returns the indices of these T tokens in the
// flattened batch, int64 (T,); the cumulative lengths of the sequences, int32 (B + 1,); and the
// length of the longest sequence.
std::tuple<at::Tensor, at::Tensor, int64_t> unpad_indices(const at::Tensor& mask_in) {
  TORCH_CHECK_VALUE(mask_in.dim() == 2, "mask: got shape ", mask_in.sizes(), ", allowed: (B, L)");
  const auto mask = private_copy(mask_in, mask_in.scalar_type());
  const int64_t batch = mask.size(0), length = mask.size(1);
  auto cu_seqlens = empty({batch + 1}, mask.options().dtype(at::kInt));
  int32_t* ends = cu_seqlens.mutable_data_ptr<int32_t>();
  return with_integers("mask", mask, [&](const auto* x) {
    int64_t longest = 0, total = 0;
    ends[0] = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const auto* row = x + b * length;
      const int64_t count = std::count_if(row, row + length, [](auto v) { return v != 0; });
      longest = std::max(longest, count);
      ends[b + 1] = (int32_t)(total += count);
    }
    auto indices = empty({total}, mask.options().dtype(at::kLong));
    int64_t* place = indices.mutable_data_ptr<int64_t>();
    for (int64_t i = 0; i < batch * length; ++i)
      if (x[i] != 0) *place++ = i;
    return std::make_tuple(indices, cu_seqlens, longest);
  });
}

// Returns a tensor (rows, ...) whose row indices[i] is values[i], and whose other rows are 0. If
// the indices are ascending, as those from unpad_indices are, one pass over the result is enough.
at::Tensor scatter_rows(const at::Tensor& values_in, const at::Tensor& indices_in, int64_t rows) {
  TORCH_CHECK_VALUE(values_in.dim() >= 1, "values: got shape ", values_in.sizes(),
                    ", allowed: (T, ...)");
  TORCH_CHECK_VALUE(indices_in.dim() == 1 && values_in.size(0) == indices_in.size(0),
                    "indices: got shape ", indices_in.sizes(), ", allowed: (", values_in.size(0),
                    ",), one index for each row of values");
  TORCH_CHECK_TYPE(indices_in.scalar_type() == at::kLong, "indices: got dtype ",
                   indices_in.scalar_type(), ", allowed: Long");
  TORCH_CHECK_VALUE(rows >= 0, "rows: got ", rows, ", allowed: rows >= 0");
  const auto values = values_in.contiguous(), indices = private_copy(indices_in, at::kLong);
  auto sizes = values.sizes().vec();
  sizes[0] = rows;
  auto out = empty(sizes, values.options());
  const int64_t count = values.size(0), columns = count == 0 ? 0 : values.numel() / count;
  const int64_t bytes = columns * (int64_t)values.element_size();
  const int64_t* place = indices.const_data_ptr<int64_t>();
  bool rising = true;
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(place[i] >= 0 && place[i] < rows, "indices: got ", place[i],
                      ", allowed: 0 to ", rows - 1);
    rising &= i == 0 || place[i] > place[i - 1];
  }
  if (!rising) return out.zero_().index_copy_(0, indices, values);
  // An empty tensor has no memory, and memset must not get a null pointer.
  if (out.nbytes() == 0) return out;
  const char* from = static_cast<const char*>(values.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  if (count == 0) {
    std::memset(to, 0, out.nbytes());
    return out;
  }
  // A thread writes the rows from the index of its first value up to the index of the next thread's
  // first value. The first thread begins at row 0.
  parallel_for(count, grain_rows(std::max<int64_t>(1, columns)), [&](int64_t begin, int64_t end) {
    int64_t row = begin == 0 ? 0 : place[begin];
    for (int64_t i = begin; i < end; ++i) {
      std::memset(to + row * bytes, 0, (place[i] - row) * bytes);
      std::memcpy(to + place[i] * bytes, from + i * bytes, bytes);
      row = place[i] + 1;
    }
    const int64_t next = end == count ? rows : place[end];
    std::memset(to + row * bytes, 0, (next - row) * bytes);
  });
  return out;
}

}  // namespace fastbert::cpu
