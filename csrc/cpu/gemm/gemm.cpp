// Matrix products with their epilogues on the CPU. The operators check tensors and share tasks out
// to threads.

#include <atomic>
#include <thread>
#include <vector>

#include "../isa/dispatch.h"
#include "../operands.h"
#include "../operators.h"
#include "packed_weights.h"

namespace fastbert::cpu {
namespace {

// Checks a weight (N, K) for x (M, K), in the dtype of x or fp32.
void check_weight(const at::Tensor& weight, const at::Tensor& x, const char* name = "weight") {
  check_device(name, weight, x);
  TORCH_CHECK_TYPE(weight.scalar_type() == x.scalar_type() || weight.scalar_type() == at::kFloat,
                   name, ": got dtype ", weight.scalar_type(), ", allowed: ", x.scalar_type(),
                   ", the dtype of x, or Float");
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(0) >= 1 && weight.size(1) == x.size(1), name,
                    ": got shape ", weight.sizes(), ", allowed: (N, ", x.size(1), ") with N >= 1");
}

// Below about this many multiplications, a second thread costs more time than it saves.
constexpr double kProductGrain = 400e3;

// With fewer rows than this, tasks of whole rows do not keep the multipliers of every thread busy,
// and each task reads the whole weight.
constexpr int64_t kRowsPerThread = 32;

void run(const Kernels& k, const Gemm& g) {
  const bool small = (double)g.m * (double)g.n * (double)std::max<int64_t>(1, g.k) < kProductGrain;
  const int threads = small ? 1 : at::get_num_threads();
  const GemmPlan plan = k.gemm_plan(g, threads);
  for_each_task(plan.tasks, threads, [&](int64_t task) {
    k.gemm(g, plan, task, task + 1, thread_scratch(plan.scratch));
  });
}

// A product, and the number of its first task among the tasks of several products.
struct Planned {
  Gemm gemm;
  GemmPlan plan;
  int64_t first;
};

// Packs x and computes products of it, in one parallel region. The tasks of the products wait until
// x is packed. Tasks are taken in order, so threads already work on the last parts of x when the
// first task waits.
void run_packed(const Kernels& k, const Packing& x, const std::vector<Gemm>& products) {
  double work = 0.0;
  for (const Gemm& g : products) work += (double)g.m * (double)g.n * (double)g.k;
  const int threads = work < kProductGrain ? 1 : at::get_num_threads();
  const int64_t units = k.pack_units(x.n);
  int64_t tasks = units;
  std::vector<Planned> planned;
  for (const Gemm& g : products) {
    planned.push_back({g, k.gemm_plan(g, threads), tasks});
    tasks += planned.back().plan.tasks;
  }
  std::atomic<int64_t> unpacked{units};
  for_each_task(tasks, threads, [&](int64_t task) {
    if (task < units) {
      k.pack(x, task, task + 1);
      unpacked.fetch_sub(1, std::memory_order_release);
      return;
    }
    while (unpacked.load(std::memory_order_acquire) > 0) std::this_thread::yield();
    size_t i = planned.size() - 1;
    while (task < planned[i].first) --i;
    const Planned& p = planned[i];
    const int64_t own = task - p.first;
    k.gemm(p.gemm, p.plan, own, own + 1, thread_scratch(p.plan.scratch));
  });
}

// Describes the product x Wᵀ + bias + residual. The caller sets the output and further steps.
Gemm product(const at::Tensor& x, const at::Tensor& packed, int64_t n, const OptionalTensor& bias,
             const OptionalTensor& residual) {
  Gemm g = {};
  g.format = g.packed_format = g.pre_activation_format = g.out_format = format_of(x);
  g.m = x.size(0);
  g.n = g.out_row = n;
  g.k = x.size(1);
  g.a = x.const_data_ptr();
  g.a_row = x.stride(0);
  g.a_column = x.stride(1);
  g.packed = packed.const_data_ptr();
  g.bias = floats(bias);
  g.residual = matrix(residual);
  if (residual) g.residual_format = format_of(*residual);
  return g;
}

// Puts the weight on the left of a product whose packed operand holds the rows of x.
void turn(Gemm& g, const at::Tensor& weight) {
  g.turned = true;
  g.format = format_of(weight);
  g.a = weight.const_data_ptr();
  g.a_row = weight.stride(0);
  g.a_column = weight.stride(1);
}

// Copies of the biases in fp32, which are as long as their weights have rows; or nothing.
std::vector<OptionalTensor> biases_of(at::TensorList biases, at::TensorList weights,
                                      const at::Tensor& x) {
  TORCH_CHECK_VALUE(biases.empty() || biases.size() == weights.size(), "biases: got ",
                    biases.size(), " tensors, allowed: none, or ", weights.size(),
                    ", the number of weights");
  std::vector<OptionalTensor> made(weights.size());
  for (size_t i = 0; i < biases.size(); ++i) {
    check_vector("biases", biases[i], x, weights[i].size(0));
    made[i] = as_float(OptionalTensor(biases[i]));
  }
  return made;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> linear(const at::Tensor& x, const at::Tensor& weight,
                                          const OptionalTensor& bias_in,
                                          const OptionalTensor& residual_in,
                                          const std::string& activation, bool save) {
  check_matrix("x", x);
  check_weight(weight, x);
  const int64_t m = x.size(0), n = weight.size(0);
  if (bias_in) check_vector("bias", *bias_in, x, n);
  if (residual_in) check_summand("residual", *residual_in, x, m, n, x.scalar_type());
  const auto bias = as_float(bias_in), residual = with_unit_columns(residual_in);
  const Activation function = epilogue_activation(activation);
  auto y = empty({m, n}, x.options());
  auto h = save ? empty({m, n}, x.options()) : empty({0}, x.options());
  if (m == 0) return {y, h};
  const auto w = packed(weight, format_of(x), m);
  Gemm g = product(x, w, n, bias, residual);
  g.activation = function;
  g.pre_activation = save ? h.mutable_data_ptr() : nullptr;
  g.out = y.mutable_data_ptr();
  run(kernels(), g);
  return {y, h};
}

at::Tensor linear_of_parts(const at::Tensor& x, at::TensorList weights, at::TensorList biases_in,
                           const std::string& activation) {
  check_matrix("x", x);
  TORCH_CHECK_VALUE(!weights.empty(), "weights: got no tensor, allowed: at least 1");
  int64_t n = 0;
  for (const at::Tensor& weight : weights) {
    check_weight(weight, x, "weights");
    n += weight.size(0);
  }
  const auto biases = biases_of(biases_in, weights, x);
  const Activation function = epilogue_activation(activation);
  const int64_t m = x.size(0);
  auto y = empty({m, n}, x.options());
  if (m == 0) return y;
  const Kernels& k = kernels();
  const Format format = format_of(x);
  auto packed = empty({k.packed_bytes(format, m, x.size(1))}, x.options().dtype(at::kByte));
  const Packing packing = {format,      format, x.const_data_ptr(), x.stride(0),
                           x.stride(1), m,      x.size(1),          packed.mutable_data_ptr()};
  char* out = (char*)y.mutable_data_ptr();
  std::vector<Gemm> products;
  for (size_t i = 0; i < weights.size(); ++i) {
    Gemm g = product(x, packed, weights[i].size(0), biases[i], std::nullopt);
    turn(g, weights[i]);
    g.activation = function;
    g.out = out;
    g.out_row = n;
    out += g.n * y.element_size();
    products.push_back(g);
  }
  run_packed(k, packing, products);
  return y;
}

at::Tensor linear_layer_norm(const at::Tensor& x, const at::Tensor& weight,
                             const OptionalTensor& bias_in, const at::Tensor& residual_in,
                             const at::Tensor& norm_weight_in, const at::Tensor& norm_bias_in,
                             double eps) {
  check_matrix("x", x);
  check_weight(weight, x);
  const int64_t m = x.size(0), n = weight.size(0);
  if (bias_in) check_vector("bias", *bias_in, x, n);
  const bool wide = residual_in.scalar_type() == at::kFloat;
  check_summand("residual", residual_in, x, m, n, wide ? at::kFloat : x.scalar_type());
  check_vector("norm_weight", norm_weight_in, x, n);
  check_vector("norm_bias", norm_bias_in, x, n);
  check_eps(eps);
  const auto bias = as_float(bias_in), norm_weight = as_float(OptionalTensor(norm_weight_in));
  const auto norm_bias = as_float(OptionalTensor(norm_bias_in));
  const OptionalTensor residual = fastbert::with_unit_columns(residual_in);
  auto y = empty({m, n}, residual_in.options());
  if (m == 0) return y;
  const auto w = packed(weight, format_of(x), m);
  Gemm g = product(x, w, n, bias, residual);
  g.out_format = format_of(y);
  // A task needs whole rows to normalise them. If there are too few rows for such tasks, tasks of
  // any shape form the sums. A product of depth 0 then normalises the rows of sums, with the same
  // operations in the same order.
  at::Tensor sums;
  if (m < kRowsPerThread * at::get_num_threads()) {
    sums = empty({m, n}, x.options().dtype(at::kFloat));
    g.out_format = Format::f32;
    g.out = sums.mutable_data_ptr();
    run(kernels(), g);
    g = {};
    g.m = m;
    g.n = g.out_row = n;
    g.residual = matrix(sums);
    g.out_format = format_of(y);
  }
  g.norm_weight = floats(norm_weight);
  g.norm_bias = floats(norm_bias);
  g.eps = (float)eps;
  g.out = y.mutable_data_ptr();
  run(kernels(), g);
  return y;
}

at::Tensor matmul(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& addend_in,
                  at::ScalarType dtype) {
  check_dtype("a", a);
  TORCH_CHECK_VALUE(a.dim() == 2, "a: got shape ", a.sizes(), ", allowed: (M, K)");
  check_device("b", b, a);
  TORCH_CHECK_TYPE(b.scalar_type() == a.scalar_type() || b.scalar_type() == at::kFloat,
                   "b: got dtype ", b.scalar_type(), ", allowed: ", a.scalar_type(),
                   ", the dtype of a, or Float");
  TORCH_CHECK_VALUE(b.dim() == 2 && b.size(0) == a.size(1), "b: got shape ", b.sizes(),
                    ", allowed: (", a.size(1), ", N)");
  check_result_dtype(dtype);
  const int64_t m = a.size(0), n = b.size(1);
  if (addend_in) check_summand("addend", *addend_in, a, m, n, dtype);
  auto out = empty({m, n}, a.options().dtype(dtype));
  if (m == 0 || n == 0) return out;
  const auto addend = with_unit_columns(addend_in);
  const auto w = pack_once(b.t(), format_of(a));
  Gemm g = product(a, w, n, std::nullopt, addend);
  g.out_format = format_of(out);
  g.out = out.mutable_data_ptr();
  run(kernels(), g);
  return out;
}

}  // namespace fastbert::cpu
