// Matrix products with their epilogues on the CPU. The operators check tensors, divide the work
// into tasks and distribute the tasks over threads.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <vector>

#include "../isa/dispatch.h"
#include "../operands.h"
#include "../operators.h"
#include "blocks.h"

namespace fastbert::cpu {
namespace {

// Checks that `weight` is (N, K) for an x of shape (M, K), and that its dtype is fp32 or `dtype`,
// the dtype of the product.
void check_weight(const at::Tensor& weight, const at::Tensor& x, at::ScalarType dtype,
                  const char* name = "weight") {
  check_device(name, weight, x);
  TORCH_CHECK_TYPE(weight.scalar_type() == dtype || weight.scalar_type() == at::kFloat, name,
                   ": got dtype ", weight.scalar_type(), ", allowed: ", dtype,
                   ", the dtype of the product, or Float");
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(0) >= 1 && weight.size(1) == x.size(1), name,
                    ": got shape ", weight.sizes(), ", allowed: (N, ", x.size(1), ") with N >= 1");
}

// Below about this many multiplications, a second thread takes more time than it saves.
constexpr int64_t kProductGrain = 400'000;

// A task that computes and normalises whole rows takes a multiple of kNormUnit rows. kNormUnit is a
// multiple of the panel width at every level. The task's packed rows of x and its sums have at most
// kNormBytes bytes, and fit a second-level cache of 1 MiB. Only tasks of up to kFewNormUnits *
// kNormUnit rows may have more bytes.
constexpr int64_t kNormUnit = 32, kFewNormUnits = 4, kNormBytes = 896 << 10;

// The rows of a matrix (x, or a weight), packed as the right operand of products. This object owns
// the memory of the packed rows, which is freed at the end of the operator's call.
struct RightOperand {
  Packing packing = {};
  at::Tensor bytes;

  RightOperand(const Kernels& k, const at::Tensor& x, Format format)
      : RightOperand(k, x.size(0), x.size(1), format) {
    packing = {format_of(x), format,    x.const_data_ptr(), x.stride(0),
               x.stride(1),  x.size(0), x.size(1),          bytes.mutable_data_ptr()};
  }

  // Describes the packing of x for products in `dtype` whose left operand is a weight as it is
  // stored. Elements of x that are wider than `dtype` are rounded while they are packed.
  RightOperand(const Kernels& k, const at::Tensor& x, at::ScalarType dtype)
      : RightOperand(
            k, x, x.scalar_type() == dtype ? k.right_format(format_of(dtype)) : format_of(dtype)) {}

  RightOperand(const Kernels& k, const at::Tensor& x) : RightOperand(k, x, x.scalar_type()) {}

  // Allocates the memory for a packed x of shape (rows, columns) in `format`. Another product may
  // write its results to this memory, in packed form.
  RightOperand(const Kernels& k, int64_t rows, int64_t columns, Format format) {
    bytes = empty({k.packed_bytes(format, rows, columns)}, at::dtype(at::kByte));
    packing.to = format;
    packing.packed = bytes.mutable_data_ptr();
  }
};

int threads_for(double work) {
  return work < (double)worth_a_thread(kProductGrain) ? 1 : at::get_num_threads();
}

double work_of(const Gemm& g) { return (double)g.m * (double)g.n * (double)g.k; }

// A group of tasks. Each of these tasks needs the results of all tasks of the previous phase.
struct Phase {
  int64_t count;
  std::function<void(int64_t task)> body;
};

// Runs the phases one after another in one parallel region, because waking the threads again would
// take as long as a small product. Threads take the tasks in order. While the first task of a phase
// waits for the previous phase, the other threads still work on the last tasks of the previous
// phase.
void run(const std::vector<Phase>& phases, int threads) {
  std::vector<std::atomic<int64_t>> unfinished(phases.size());
  int64_t tasks = 0;
  for (size_t i = 0; i < phases.size(); ++i) tasks += unfinished[i] = phases[i].count;
  for_each_task(tasks, threads, [&](int64_t task) {
    size_t i = 0;
    while (task >= phases[i].count) task -= phases[i++].count;
    Pause pause;
    while (i > 0 && unfinished[i - 1].load(std::memory_order_acquire) > 0) pause();
    phases[i].body(task);
    unfinished[i].fetch_sub(1, std::memory_order_release);
  });
}

Phase packing_of(const Kernels& k, const Packing& x) {
  return {k.pack_units(x.n), [&k, &x](int64_t unit) { k.pack(x, unit, unit + 1); }};
}

// A product and its division into tasks. `first` is the number of the product's first task among
// the tasks of all products.
struct Planned {
  Gemm gemm;
  GemmPlan plan;
  int64_t first;
};

Phase products_of(const Kernels& k, const std::vector<Gemm>& products, int threads) {
  int64_t tasks = 0;
  std::vector<Planned> planned;
  for (const Gemm& g : products) {
    planned.push_back({g, k.gemm_plan(g, threads), tasks});
    tasks += planned.back().plan.tasks;
  }
  return {tasks, [&k, planned = std::move(planned)](int64_t task) {
            size_t i = planned.size() - 1;
            while (task < planned[i].first) --i;
            const Planned& p = planned[i];
            const int64_t own = task - p.first;
            k.gemm(p.gemm, p.plan, own, own + 1, thread_scratch(p.plan.scratch));
          }};
}

// Has the products read the rows of x as they are stored, if all of them can. Returns whether they
// can; otherwise, x must be packed.
bool set_rows(const Kernels& k, const Packing& x, Gemm* begin, Gemm* end) {
  if (!std::all_of(begin, end, [&](const Gemm& g) { return k.reads_rows(g, x); })) return false;
  std::for_each(begin, end, [&](Gemm& g) {
    g.few = {x.weight, x.row};
    g.few_format = x.from;
  });
  return true;
}

// The smallest number of rows of x for which a weight that is wider than the product is rounded
// once, in a phase of its own. With fewer rows, the product rounds the weight's rows while it reads
// them, once for each block of rows of x.
constexpr int64_t kRoundedOnce = 257;

// Has the product `g` read a rounded copy of its weight, if that takes less time, and appends the
// phase that makes the copy. The phase owns the copy's memory.
void round_weight(const Kernels& k, Gemm& g, std::vector<Phase>& phases) {
  const bool is_wider = g.format == Format::f32 && g.rounded != Format::f32;
  if (!g.turned || !is_wider || g.m < kRoundedOnce || g.a_column != 1) return;
  constexpr int64_t kRows = 16;  // rows of a task
  const auto dtype = g.rounded == Format::bf16 ? at::kBFloat16 : at::kHalf;
  const at::Tensor copy = empty({g.n, g.k}, at::dtype(dtype));
  const Rounding rounding = {(const float*)g.a, g.a_row, g.k, g.rounded, copy.mutable_data_ptr()};
  phases.push_back({(g.n + kRows - 1) / kRows, [&k, copy, rounding, n = g.n](int64_t task) {
                      k.round_rows(rounding, task * kRows, std::min(n, (task + 1) * kRows));
                    }});
  g.format = g.rounded, g.a = copy.const_data_ptr(), g.a_row = g.k;
}

// Computes `products`, whose right operand is x. x is packed first if necessary.
void run(const Kernels& k, const Packing& x, std::vector<Gemm> products) {
  double work = 0.0;
  for (const Gemm& g : products) work += work_of(g);
  const int threads = threads_for(work);
  std::vector<Phase> phases;
  for (Gemm& g : products) round_weight(k, g, phases);
  if (!set_rows(k, x, products.data(), products.data() + products.size()))
    phases.push_back(packing_of(k, x));
  phases.push_back(products_of(k, products, threads));
  run(phases, threads);
}

// Describes the product x Wᵀ + bias + residual in `dtype`. The caller sets the operands, the output
// and further steps of the epilogue.
Gemm product(const at::Tensor& x, at::ScalarType dtype, int64_t n, const OptionalTensor& bias,
             const OptionalTensor& residual) {
  Gemm g = {};
  g.rounded = g.pre_activation_format = g.out_format = format_of(dtype);
  g.m = x.size(0);
  g.n = g.out_row = n;
  g.k = x.size(1);
  g.bias = floats(bias);
  g.residual = matrix(residual);
  if (residual) g.residual_format = format_of(*residual);
  return g;
}

void set_operands(Gemm& g, const at::Tensor& a, const RightOperand& right) {
  g.packed = right.packing.packed;
  g.packed_format = right.packing.to;
  g.format = format_of(a);
  g.a = a.const_data_ptr();
  g.a_row = a.stride(0);
  g.a_column = a.stride(1);
}

// Returns the size of the first-level cache on processors of AMD, and 0 on others. If a block of
// rows fits this cache, it need not pass the second-level cache, where it would displace what is
// used again: on a Zen 5, one row of x then reads 58,101 × 512 weights in fp32 at 52 instead of 46
// GB/s, and four rows at 52 instead of 34 GB/s. Processors of others were not measured.
int64_t streamed_bytes() {
#if defined(__x86_64__)
  static const int64_t size = __builtin_cpu_is("amd") ? sysconf(_SC_LEVEL1_DCACHE_SIZE) : 0;
  return size;
#else
  return 0;
#endif
}

// Makes `weight` the left operand of a turned product, which reads it as it is stored.
void set_weight(Gemm& g, const at::Tensor& weight, const RightOperand& right) {
  g.turned = true;
  g.streamed_bytes = streamed_bytes();
  set_operands(g, weight, right);
  reads(g.a);
}

// Describes the product x weightᵀ + bias + residual in `dtype`, in which `weight` is the left
// operand and `right` is the packed x.
Gemm product(const at::Tensor& x, at::ScalarType dtype, const RightOperand& right,
             const at::Tensor& weight, const OptionalTensor& bias, const OptionalTensor& residual) {
  Gemm g = product(x, dtype, weight.size(0), bias, residual);
  set_weight(g, weight, right);
  return g;
}

// Returns whether a product in `dtype` packs its weight instead of x. A product in fp32 does so if
// x has many rows and the packed weight has at most 1 MiB. The weight then stays in the
// second-level cache while all rows of x are multiplied.
bool packs_weight(const at::Tensor& x, const at::Tensor& weight, at::ScalarType dtype) {
  constexpr int64_t kManyRows = 512, kMostElements = 1 << 18;
  return dtype == at::kFloat && x.size(0) >= kManyRows && weight.numel() <= kMostElements;
}

// The product of x with a weight, followed by the addition of a residual and layer norm.
class NormedProduct {
 public:
  // Checks the arguments of `linear_layer_norm`. Error messages call the weight `weight_name` and
  // the bias `bias_name`.
  NormedProduct(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                const at::Tensor& residual, const at::Tensor& norm_weight,
                const at::Tensor& norm_bias, double eps, const char* weight_name = "weight",
                const char* bias_name = "bias")
      : weight_(weight), m_(x.size(0)), n_(weight.size(0)) {
    check_weight(weight, x, x.scalar_type(), weight_name);
    if (bias) check_vector(bias_name, *bias, x, n_);
    const bool wide = residual.scalar_type() == at::kFloat;
    check_summand("residual", residual, x, m_, n_, wide ? at::kFloat : x.scalar_type());
    check_vector("norm_weight", norm_weight, x, n_);
    check_vector("norm_bias", norm_bias, x, n_);
    check_eps(eps);
    bias_ = as_float(bias), norm_weight_ = as_float(OptionalTensor(norm_weight));
    norm_bias_ = as_float(OptionalTensor(norm_bias));
    residual_ = fastbert::with_unit_columns(residual);
    y = empty({m_, n_}, residual.options());
    gemm_ = product(x, x.scalar_type(), n_, bias_, residual_);
    gemm_.out_format = Format::f32;
    norm_ = {format_of(y),        n_, nullptr, floats(norm_weight_), floats(norm_bias_), (float)eps,
             y.mutable_data_ptr()};
  }

  double work() const { return work_of(gemm_); }

  // Appends to `phases` the phases of the product. Unless `is_packed` is true, a phase that packs x
  // precedes them if it is necessary.
  void add_to(std::vector<Phase>& phases, const Kernels& k, const RightOperand& x, int threads,
              bool is_packed) {
    set_weight(gemm_, weight_, x);
    round_weight(k, gemm_, phases);
    if (!is_packed && !set_rows(k, x.packing, &gemm_, &gemm_ + 1)) {
      phases.push_back(packing_of(k, x.packing));
    }
    if (m_ <= kNormUnit * threads) {
      add_few_rows(phases, k, threads);
    } else {
      phases.push_back(whole_rows(k, threads));
    }
  }

  at::Tensor y;

 private:
  // Appends the two phases of a product with at most kNormUnit rows for each thread. In the first
  // phase, each task multiplies x by some rows of the weight. The second phase normalises the sums,
  // which are still in the second-level cache.
  void add_few_rows(std::vector<Phase>& phases, const Kernels& k, int threads) {
    sums_ = empty({m_, n_}, y.options().dtype(at::kFloat));
    gemm_.out = sums_.mutable_data_ptr();
    norm_.sums = sums_.const_data_ptr<float>();
    constexpr int64_t kRows = 8;
    phases.push_back(products_of(k, {gemm_}, threads));
    phases.push_back({(m_ + kRows - 1) / kRows, [this, &k](int64_t task) {
                        k.normalise(norm_, task * kRows, std::min(m_, (task + 1) * kRows));
                      }});
  }

  // Returns the phase of a product with more than kNormUnit rows for each thread. Each task
  // computes and normalises whole rows, and its sums are in the scratch memory of its thread.
  Phase whole_rows(const Kernels& k, int threads) const {
    const int64_t unit_bytes = k.packed_bytes(gemm_.packed_format, kNormUnit, gemm_.k) +
                               kNormUnit * n_ * (int64_t)sizeof(float);
    int64_t units = (m_ / threads + kNormUnit - 1) / kNormUnit;
    while (units > kFewNormUnits && units * unit_bytes > kNormBytes) units = (units + 1) / 2;
    const int64_t rows = units * kNormUnit, blocks = (m_ + rows - 1) / rows;
    const int64_t residual_size = residual_->element_size(), y_size = y.element_size();
    return {blocks, [this, &k, rows, residual_size, y_size](int64_t block) {
              const int64_t begin = block * rows;
              Gemm part = gemm_;
              part.m = std::min(rows, m_ - begin);
              part.packed =
                  (const char*)gemm_.packed + k.packed_bytes(gemm_.packed_format, begin, gemm_.k);
              part.residual.data =
                  (const char*)gemm_.residual.data + begin * gemm_.residual.stride * residual_size;
              const GemmPlan plan = k.gemm_plan(part, 1);
              char* scratch = (char*)thread_scratch(plan.scratch + rows * n_ * 4);
              part.out = scratch + plan.scratch;
              k.gemm(part, plan, 0, plan.tasks, scratch);
              RowNorm own = norm_;
              own.sums = (const float*)part.out;
              own.y = (char*)norm_.y + begin * n_ * y_size;
              k.normalise(own, 0, part.m);
            }};
  }

  const at::Tensor weight_;
  const int64_t m_, n_;
  OptionalTensor bias_, residual_, norm_weight_, norm_bias_;
  at::Tensor sums_;
  Gemm gemm_;
  RowNorm norm_;
};

// Computes the product of x and the layer norm.
at::Tensor normed_product(const at::Tensor& x, NormedProduct normed) {
  if (x.size(0) == 0) return normed.y;
  const Kernels& k = kernels();
  const RightOperand right(k, x);
  const int threads = threads_for(normed.work());
  std::vector<Phase> phases;
  normed.add_to(phases, k, right, threads, false);
  run(phases, threads);
  return normed.y;
}

// Checks that each bias has one element for each row of its weight, and returns the biases in fp32.
// If `biases` is empty, the result has one absent bias for each weight.
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

std::tuple<at::Tensor, at::Tensor> linear_in(at::ScalarType dtype, const at::Tensor& x,
                                             const at::Tensor& weight,
                                             const OptionalTensor& bias_in,
                                             const OptionalTensor& residual_in,
                                             const std::string& activation, bool save) {
  check_matrix("x", x);
  check_weight(weight, x, dtype);
  const int64_t m = x.size(0), n = weight.size(0);
  if (bias_in) check_vector("bias", *bias_in, x, n);
  if (residual_in) check_summand("residual", *residual_in, x, m, n, dtype);
  const auto bias = as_float(bias_in), residual = with_unit_columns(residual_in);
  const Activation function = epilogue_activation(activation);
  const auto options = x.options().dtype(dtype);
  auto y = empty({m, n}, options), h = save ? empty({m, n}, options) : empty({0}, options);
  if (m == 0) return {y, h};
  const Kernels& k = kernels();
  const bool packs = packs_weight(x, weight, dtype);
  const RightOperand right =
      packs ? RightOperand(k, weight, Format::f32) : RightOperand(k, x, dtype);
  Gemm g = packs ? product(x, dtype, n, bias, residual)
                 : product(x, dtype, right, weight, bias, residual);
  if (packs) set_operands(g, x, right);
  g.activation = function;
  g.pre_activation = save ? h.mutable_data_ptr() : nullptr;
  g.out = y.mutable_data_ptr();
  run(k, right.packing, {g});
  return {y, h};
}

at::Tensor parts_in(at::ScalarType dtype, const at::Tensor& x, at::TensorList weights,
                    at::TensorList biases_in, const std::string& activation) {
  check_matrix("x", x);
  TORCH_CHECK_VALUE(!weights.empty(), "weights: got no tensor, allowed: at least 1");
  int64_t n = 0;
  for (const at::Tensor& weight : weights) {
    check_weight(weight, x, dtype, "weights");
    n += weight.size(0);
  }
  const auto biases = biases_of(biases_in, weights, x);
  const Activation function = epilogue_activation(activation);
  const int64_t m = x.size(0);
  auto y = empty({m, n}, x.options().dtype(dtype));
  if (m == 0) return y;
  const Kernels& k = kernels();
  const RightOperand right(k, x, dtype);
  char* out = (char*)y.mutable_data_ptr();
  std::vector<Gemm> products;
  for (size_t i = 0; i < weights.size(); ++i) {
    Gemm g = product(x, dtype, right, weights[i], biases[i], std::nullopt);
    g.activation = function;
    g.out = out;
    g.out_row = n;
    out += g.n * y.element_size();
    products.push_back(g);
  }
  run(k, right.packing, products);
  return y;
}

std::tuple<at::Tensor, at::Tensor> linear(const at::Tensor& x, const at::Tensor& weight,
                                          const OptionalTensor& bias,
                                          const OptionalTensor& residual,
                                          const std::string& activation, bool save) {
  return linear_in(x.scalar_type(), x, weight, bias, residual, activation, save);
}

at::Tensor linear_of_parts(const at::Tensor& x, at::TensorList weights, at::TensorList biases,
                           const std::string& activation) {
  return parts_in(x.scalar_type(), x, weights, biases, activation);
}

at::Tensor linear_layer_norm(const at::Tensor& x, const at::Tensor& weight,
                             const OptionalTensor& bias, const at::Tensor& residual,
                             const at::Tensor& norm_weight, const at::Tensor& norm_bias,
                             double eps) {
  check_matrix("x", x);
  return normed_product(x, {x, weight, bias, residual, norm_weight, norm_bias, eps});
}

at::Tensor feed_forward_in(at::ScalarType dtype, const at::Tensor& x, const at::Tensor& inner,
                           const OptionalTensor& inner_bias_in, const at::Tensor& outer,
                           const OptionalTensor& outer_bias, const at::Tensor& residual,
                           const at::Tensor& norm_weight, const at::Tensor& norm_bias,
                           const std::string& activation, double eps) {
  check_matrix("x", x);
  check_weight(inner, x, dtype, "inner");
  const int64_t m = x.size(0), n = inner.size(0);
  if (inner_bias_in) check_vector("inner_bias", *inner_bias_in, x, n);
  const auto normed_of = [&](const at::Tensor& activations) {
    return NormedProduct(activations, outer, outer_bias, residual, norm_weight, norm_bias, eps,
                         "outer", "outer_bias");
  };
  if (n % kNormUnit != 0 || m <= kFewRows) {
    // Only whole panels of rows of `inner` can be written directly as the packed operand of the
    // second product. Few rows are not packed.
    const auto between =
        std::get<0>(linear_in(dtype, x, inner, inner_bias_in, std::nullopt, activation, false));
    return normed_product(between, normed_of(between));
  }
  const auto inner_bias = as_float(inner_bias_in);
  const Activation function = epilogue_activation(activation);
  // The activations exist only in packed panels. NormedProduct needs only their shape and dtype, so
  // it gets a tensor of one element that is expanded to this shape.
  NormedProduct normed = normed_of(empty({1, 1}, x.options().dtype(dtype)).expand({m, n}));
  if (m == 0) return normed.y;
  const Kernels& k = kernels();
  const RightOperand right(k, x, dtype), activations(k, m, n, k.right_format(format_of(dtype)));
  Gemm g = product(x, dtype, right, inner, inner_bias, std::nullopt);
  g.activation = function;
  g.next = activations.packing.packed;
  g.next_format = activations.packing.to;
  const int threads = threads_for(std::max(work_of(g), normed.work()));
  std::vector<Phase> phases;
  round_weight(k, g, phases);
  phases.push_back(packing_of(k, right.packing));
  phases.push_back(products_of(k, {g}, threads));
  normed.add_to(phases, k, activations, threads, true);
  run(phases, threads);
  return normed.y;
}

at::Tensor feed_forward_layer_norm(const at::Tensor& x, const at::Tensor& inner,
                                   const OptionalTensor& inner_bias, const at::Tensor& outer,
                                   const OptionalTensor& outer_bias, const at::Tensor& residual,
                                   const at::Tensor& norm_weight, const at::Tensor& norm_bias,
                                   const std::string& activation, double eps) {
  return feed_forward_in(x.scalar_type(), x, inner, inner_bias, outer, outer_bias, residual,
                         norm_weight, norm_bias, activation, eps);
}

void for_each_block_of_sums(const at::Tensor& x, const at::Tensor& weight, int64_t own_bytes,
                            const std::function<void(const BlockOfSums& block)>& body) {
  const int64_t m = x.size(0), n = weight.size(0);
  if (m == 0) return;
  const Kernels& k = kernels();
  const RightOperand right(k, x);
  Gemm whole = product(x, x.scalar_type(), right, weight, std::nullopt, std::nullopt);
  whole.out_format = Format::f32;
  whole.out_row = kBlockOfColumns;
  const int64_t row_bytes = weight.stride(0) * weight.element_size();
  const auto block_at = [&](int64_t row, int64_t column) {
    Gemm g = whole;
    g.m = std::min(kBlockOfRows, m - row);
    g.n = std::min(kBlockOfColumns, n - column);
    g.a = (const char*)whole.a + column * row_bytes;
    g.packed = (const char*)whole.packed + k.packed_bytes(whole.packed_format, row, whole.k);
    return g;
  };
  constexpr int64_t kSums = kBlockOfRows * kBlockOfColumns * (int64_t)sizeof(float);
  const int64_t own = (own_bytes + 63) / 64 * 64, last = (m - 1) / kBlockOfRows * kBlockOfRows;
  const auto task = [&](int64_t block) {
    const int64_t column = block * kBlockOfColumns;
    // The scratch memory of a thread may move when it grows, so the largest size is requested once.
    const int64_t most = std::max(k.gemm_plan(block_at(0, column), 1).scratch,
                                  k.gemm_plan(block_at(last, column), 1).scratch);
    char* memory = (char*)thread_scratch(own + kSums + most);
    for (int64_t row = 0; row < m; row += kBlockOfRows) {
      Gemm g = block_at(row, column);
      g.out = memory + own;
      const GemmPlan plan = k.gemm_plan(g, 1);
      k.gemm(g, plan, 0, plan.tasks, memory + own + kSums);
      body({row, g.m, column, g.n, (const float*)g.out, memory});
    }
  };
  run({packing_of(k, right.packing), {(n + kBlockOfColumns - 1) / kBlockOfColumns, task}},
      threads_for(work_of(whole)));
}

void matmul_into(const at::Tensor& out, at::ScalarType dtype, const at::Tensor& a,
                 const at::Tensor& b, const OptionalTensor& addend) {
  const int64_t m = out.size(0), n = out.size(1);
  if (m == 0 || n == 0) return;
  const Kernels& k = kernels();
  const bool turned = b.stride(0) == 1;
  const RightOperand right =
      turned ? RightOperand(k, a, dtype) : RightOperand(k, b.t(), format_of(dtype));
  Gemm g = product(a, dtype, n, std::nullopt, addend);
  g.turned = turned;
  set_operands(g, turned ? b.t() : a, right);
  g.out_format = format_of(out);
  g.out = out.mutable_data_ptr();
  g.out_row = out.stride(0);
  run(k, right.packing, {g});
}

at::Tensor matmul(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& addend_in,
                  at::ScalarType dtype) {
  check_dtype("a", a);
  TORCH_CHECK_VALUE(a.dim() == 2, "a: got shape ", a.sizes(), ", allowed: (M, K)");
  check_device("b", b, a);
  check_dtype_or_float("b", b, a.scalar_type(), "a");
  TORCH_CHECK_VALUE(b.dim() == 2 && b.size(0) == a.size(1), "b: got shape ", b.sizes(),
                    ", allowed: (", a.size(1), ", N)");
  check_result_dtype(dtype);
  const int64_t m = a.size(0), n = b.size(1);
  if (addend_in) check_summand("addend", *addend_in, a, m, n, dtype);
  auto out = empty({m, n}, a.options().dtype(dtype));
  matmul_into(out, a.scalar_type(), a, b, with_unit_columns(addend_in));
  return out;
}

}  // namespace fastbert::cpu
