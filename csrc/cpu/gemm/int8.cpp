// int8 products on the CPU. The operator quantises the rows of its argument x, divides the result
// into blocks and distributes the blocks over threads.

#include <ATen/Dispatch.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "../isa/dispatch.h"
#include "../operands.h"
#include "../operators.h"

namespace fastbert::cpu {
namespace {

// The largest number of terms in a sum. A term is at most 255 * 128, so sums of this many terms
// stay below 2^31.
constexpr int64_t kInt8Depth = 65536;
// Numbers are padded to multiples: the panels of a weight to a multiple of 4, the quantised rows to
// a multiple of 16, and the elements of a row to a multiple of 64. These multiples are whole tiles
// at every level.
constexpr int64_t kPanels = 4, kRows = 16, kDepth = 64;
// The largest size in bytes of the quantised rows of one task. Rows of this size stay in the
// second-level cache while all weights are read.
constexpr int64_t kRowBytes = 256 * 1024;

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

void check_packed(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scale,
                  const at::Tensor& column_sum, int64_t n) {
  const Kernels& k = kernels();
  const Int8Layout layout = k.int8_layout();
  TORCH_CHECK_VALUE(x.size(1) <= kInt8Depth, "x: got ", x.size(1), " columns, allowed: at most ",
                    kInt8Depth, ", so that sums fit into 32 bits");
  TORCH_CHECK_TYPE(packed.scalar_type() == at::kChar, "packed: got dtype ", packed.scalar_type(),
                   ", allowed: Char");
  const int64_t lanes = layout.lanes, group = packed.dim() == 4 ? packed.size(3) : 0;
  TORCH_CHECK_VALUE(
      packed.is_contiguous() && (group == layout.group || group == 2) && packed.size(2) == lanes,
      "packed: got shape ", packed.sizes(), ", allowed at the level ", k.name,
      ": contiguous (panels, depth / group, ", lanes, ", group) with a group of 2 or ",
      layout.group);
  const int64_t panels = round_up((n + lanes - 1) / lanes, kPanels);
  const int64_t depth = round_up(x.size(1), kDepth);
  TORCH_CHECK_VALUE(packed.size(0) == panels && packed.size(1) * group == depth,
                    "packed: got shape ", packed.sizes(), ", allowed for x of ", x.size(1),
                    " columns and ", n, " results: (", panels, ", ", depth / group, ", ", lanes,
                    ", ", group, ")");
  for (const auto& [name, t, dtype] :
       {std::tuple("scale", scale, at::kFloat), std::tuple("column_sum", column_sum, at::kInt)}) {
    TORCH_CHECK_TYPE(t.scalar_type() == dtype, name, ": got dtype ", t.scalar_type(),
                     ", allowed: ", dtype);
    TORCH_CHECK_VALUE(t.dim() == 1 && t.is_contiguous() && t.size(0) == panels * lanes, name,
                      ": got shape ", t.sizes(), ", allowed: (", panels * lanes, ",)");
  }
}

void check_int8(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scale,
                const at::Tensor& column_sum, int64_t n, const OptionalTensor& bias,
                const OptionalTensor& residual, at::ScalarType dtype) {
  check_matrix("x", x);
  TORCH_CHECK_VALUE(n >= 1 && n <= packed.numel(), "n: got ", n, ", allowed: 1 to ", packed.numel(),
                    ", the number of elements of packed");
  check_packed(x, packed, scale, column_sum, n);
  check_result_dtype(dtype);
  if (bias) check_vector("bias", *bias, x, n);
  if (residual) check_summand("residual", *residual, x, x.size(0), n, dtype);
}

// The rows of x as integers, with one scale and one zero point for each row.
struct Quantised {
  at::Tensor q, scale, zero;

  Quantised(const at::Tensor& x, int64_t depth, int64_t group)
      : q(empty({round_up(x.size(0), kRows), depth},
                x.options().dtype(group == 2 ? at::kShort : at::kByte))),
        scale(empty({x.size(0)}, x.options().dtype(at::kFloat))),
        zero(empty({x.size(0)}, x.options().dtype(at::kInt))) {
    const int64_t rows = x.size(0), columns = x.size(1);
    const Int8Rows params = {format_of(x),
                             columns,
                             depth,
                             group,
                             matrix(x),
                             q.mutable_data_ptr(),
                             scale.mutable_data_ptr<float>(),
                             zero.mutable_data_ptr<int32_t>()};
    const Kernels& k = kernels();
    parallel_for(rows, grain_rows(columns),
                 [&](int64_t begin, int64_t end) { k.int8_quantise(params, begin, end); });
    // The kernel multiplies padding rows too and discards their results, so the padding may have
    // any initialised values.
    if (q.size(0) > rows) q.narrow(0, rows, q.size(0) - rows).zero_();
  }
};

// Computes the product in parallel tasks. The rows are divided into blocks that fit the
// second-level cache. If this division gives too few tasks for the threads, the columns are divided
// too.
void multiply(const Int8Gemm& params, int64_t m, int64_t panels, int64_t row_bytes) {
  const Kernels& k = kernels();
  const int64_t unit = 2 * kRows;
  const int64_t most = std::max(unit, kRowBytes / row_bytes / unit * unit);
  const int64_t row_blocks = (m + most - 1) / most;
  const int64_t rows = round_up((m + row_blocks - 1) / row_blocks, unit);
  // With this many tasks, the last tasks do not leave threads idle for long.
  const int64_t tasks = 8 * at::get_num_threads();
  const int64_t quarters = panels / kPanels;
  const int64_t column_blocks = std::min(quarters, (tasks + row_blocks - 1) / row_blocks);
  const int64_t threads =
      m * params.n * params.depth < worth_a_thread(16 * kGrain) ? 1 : at::get_num_threads();
  for_each_task(row_blocks * column_blocks, threads, [&](int64_t task) {
    const int64_t row = task / column_blocks * rows, part = task % column_blocks;
    if (row >= m) return;
    k.int8_gemm(params, {row, std::min(m, row + rows), part * quarters / column_blocks * kPanels,
                         (part + 1) * quarters / column_blocks * kPanels});
  });
}

}  // namespace

std::tuple<int64_t, int64_t> int8_layout() {
  const Int8Layout layout = kernels().int8_layout();
  return {layout.lanes, layout.group};
}

at::Tensor int8_linear(const at::Tensor& x_in, const at::Tensor& packed, const at::Tensor& scale,
                       const at::Tensor& column_sum, int64_t n, const OptionalTensor& bias_in,
                       const OptionalTensor& residual_in, const std::string& activation,
                       at::ScalarType dtype) {
  check_int8(x_in, packed, scale, column_sum, n, bias_in, residual_in, dtype);
  const auto x = fastbert::with_unit_columns(x_in);
  const auto residual = with_unit_columns(residual_in);
  const auto bias = as_float(bias_in);
  const int64_t m = x.size(0), group = packed.size(3), depth = packed.size(1) * group;
  auto out = empty({m, n}, x.options().dtype(dtype));
  const Activation chosen = epilogue_activation(activation);
  if (m == 0) return out;
  const Quantised rows(x, depth, group);
  Int8Gemm params = {};
  params.n = n;
  params.bias = floats(bias);
  params.activation = chosen;
  params.residual = matrix(residual);
  params.residual_format = params.out_format = format_of(out);
  params.out = out.mutable_data_ptr();
  params.out_row = n;
  params.depth = depth;
  params.group = group;
  params.q = rows.q.const_data_ptr();
  params.row_scale = rows.scale.const_data_ptr<float>();
  params.zero = rows.zero.const_data_ptr<int32_t>();
  params.packed = packed.const_data_ptr<int8_t>();
  reads(params.packed);
  params.column_scale = scale.const_data_ptr<float>();
  params.column_sum = column_sum.const_data_ptr<int32_t>();
  multiply(params, m, packed.size(0), depth * rows.q.element_size());
  return out;
}

}  // namespace fastbert::cpu
