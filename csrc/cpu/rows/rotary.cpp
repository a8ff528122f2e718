// The operator of rotary embeddings on the CPU. It checks tensors and divides the tokens among
// threads.

#include "../isa/dispatch.h"
#include "../operands.h"
#include "../operators.h"

namespace fastbert::cpu {
namespace {

void check(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int64_t heads) {
  check_dtype("x", x);
  TORCH_CHECK_VALUE(x.dim() == 3 && x.size(2) >= 2 && x.size(2) % 2 == 0, "x: got shape ",
                    x.sizes(), ", allowed: (tokens, heads, head_dim), head_dim even and >= 2");
  check_floats("cos", cos, x, {x.size(0), x.size(2) / 2});
  check_floats("sin", sin, x, {x.size(0), x.size(2) / 2});
  TORCH_CHECK_VALUE(heads >= 0 && heads <= x.size(1), "heads: got ", heads, ", allowed: 0 to ",
                    x.size(1));
}

// Writes the rotated x to y, which must be contiguous and may be x itself.
void rotate(const at::Tensor& x, const at::Tensor& cos_in, const at::Tensor& sin_in, int64_t heads,
            bool inverse, const at::Tensor& y) {
  const auto cos = cos_in.contiguous(), sin = sin_in.contiguous();
  const Rotary params = {format_of(x),
                         x.size(1),
                         heads,
                         x.size(2) / 2,
                         x.const_data_ptr(),
                         x.stride(0),
                         x.stride(1),
                         cos.const_data_ptr<float>(),
                         sin.const_data_ptr<float>(),
                         inverse ? -1.0f : 1.0f,
                         y.mutable_data_ptr()};
  const Kernels& k = kernels();
  const int64_t columns = std::max<int64_t>(1, x.size(1) * x.size(2));
  parallel_for(x.size(0), grain_rows(columns),
               [&](int64_t begin, int64_t end) { k.rotary(params, begin, end); });
}

}  // namespace

at::Tensor rotary(const at::Tensor& x_in, const at::Tensor& cos, const at::Tensor& sin,
                  int64_t heads, bool inverse) {
  check(x_in, cos, sin, heads);
  const auto x = x_in.stride(2) == 1 ? x_in : x_in.contiguous();
  auto y = empty(x.sizes(), x.options());
  rotate(x, cos, sin, heads, inverse, y);
  return y;
}

void rotate_in_place(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                     int64_t heads, bool inverse) {
  check(x, cos, sin, heads);
  rotate(x, cos, sin, heads, inverse, x);
}

}  // namespace fastbert::cpu
