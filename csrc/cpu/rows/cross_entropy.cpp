// The cross entropy of a vocabulary projection on the CPU, over the labelled rows only.
//
// The labelled rows are gathered. Their logits are computed for a block of rows and a part of the
// vocabulary at a time, and are processed while they are in the cache. The forward stores the
// maximum and the sum of exponentials of each row for the backward, which computes the logits
// again. The parts of the vocabulary have a fixed size, so a row's loss has the same bits in every
// batch.

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>

#include "../isa/dispatch.h"
#include "../operands.h"
#include "../operators.h"

namespace fastbert::cpu {
namespace {

// The number of classes and the number of rows in one block of logits. A block takes 4 MiB in fp32.
constexpr int64_t kPartClasses = 2048, kBlockRows = 512;

bool check_reduction(const std::string& reduction) {
  TORCH_CHECK_VALUE(reduction == "mean" || reduction == "sum" || reduction == "none",
                    "reduction: got '", reduction, "', allowed: 'mean', 'sum', 'none'");
  return reduction == "mean";
}

void check_projection(const at::Tensor& hidden, const at::Tensor& weight,
                      const OptionalTensor& bias, const at::Tensor& labels) {
  check_matrix("hidden", hidden);
  check_device("weight", weight, hidden);
  check_dtype_or_float("weight", weight, hidden.scalar_type(), "hidden");
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(0) >= 1 && weight.size(1) == hidden.size(1),
                    "weight: got shape ", weight.sizes(), ", allowed: (V, ", hidden.size(1),
                    ") with V >= 1");
  if (bias) check_vector("bias", *bias, weight, weight.size(0));
  check_numbers("labels", labels, hidden, hidden.size(0));
}

// The labelled rows of a batch: their indices (`rows`), hidden states and labels, in the order of
// the argument `order`.
struct Labelled {
  int64_t count;
  at::Tensor rows, hidden, labels;

  Labelled(const at::Tensor& all, const at::Tensor& all_labels, const at::Tensor& order)
      : count(count_of(order)),
        rows(order.narrow(0, 0, count)),
        hidden(all.index_select(0, rows)),
        labels(all_labels.index_select(0, rows)) {}

 private:
  // Checks the indices in `order`, which must be a private int64 copy of the result of order_of,
  // and returns the number of labelled rows.
  static int64_t count_of(const at::Tensor& order) {
    const int64_t total = order.size(0) - 1;
    const int64_t* place = order.const_data_ptr<int64_t>();
    TORCH_CHECK_VALUE(place[total] >= 0 && place[total] <= total, "order: got ", place[total],
                      " as the last number, allowed: 0 to ", total, ", the number of rows");
    for (int64_t i = 0; i < place[total]; ++i) {
      TORCH_CHECK_VALUE(place[i] >= 0 && place[i] < total, "order: got ", place[i],
                        ", allowed: 0 to ", total - 1);
    }
    return place[total];
  }
};

// Returns the indices of the labelled rows in ascending order, then the other rows in descending
// order, and then the number of labelled rows. `labels` must be a private int64 copy, which no
// other thread can change.
at::Tensor order_of(const at::Tensor& labels, int64_t ignore_index, int64_t classes) {
  const int64_t total = labels.size(0);
  auto order = empty({total + 1}, labels.options().dtype(at::kInt));
  const int64_t* label = labels.const_data_ptr<int64_t>();
  int32_t* place = order.mutable_data_ptr<int32_t>();
  int64_t count = 0, end = total;
  for (int64_t row = 0; row < total; ++row) {
    const bool labelled = label[row] != ignore_index;
    TORCH_CHECK_VALUE(!labelled || (label[row] >= 0 && label[row] < classes), "labels: got ",
                      label[row], ", allowed: 0 to ", classes - 1, ", or ", ignore_index);
    place[labelled ? count++ : --end] = (int32_t)row;
  }
  place[total] = (int32_t)count;
  return order;
}

// Divides [0, total) into parts of at most `part` elements and calls body(first, length) for each.
template <class Body>
void for_each_part(int64_t total, int64_t part, const Body& body) {
  for (int64_t first = 0; first < total; first += part) {
    body(first, std::min(part, total - first));
  }
}

at::Tensor logits_of(const Labelled& given, int64_t row, int64_t rows, const at::Tensor& part) {
  return matmul(given.hidden.narrow(0, row, rows), part.t(), std::nullopt, at::kFloat);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_cross_entropy_forward(
    const at::Tensor& hidden, const at::Tensor& weight, const OptionalTensor& bias_in,
    const at::Tensor& labels, int64_t ignore_index, const std::string& reduction) {
  check_projection(hidden, weight, bias_in, labels);
  const bool mean = check_reduction(reduction);
  const int64_t total = hidden.size(0), classes = weight.size(0);
  const auto numbers = private_copy(labels, at::kLong);
  const auto order = order_of(numbers, ignore_index, classes);
  const Labelled given(hidden, numbers, private_copy(order, at::kLong));
  const auto bias = as_float(bias_in);
  auto statistics = zeros({2, total}, hidden.options().dtype(at::kFloat));
  statistics.select(0, 0).narrow(0, 0, given.count).fill_(-2.0e38);
  auto losses = zeros({total}, statistics.options());
  float* highest = statistics.mutable_data_ptr<float>();
  float* sums = highest + total;
  auto own = zeros({given.count}, statistics.options());
  const int64_t* label = given.labels.const_data_ptr<int64_t>();
  const Kernels& k = kernels();
  const auto part_of_classes = [&](int64_t first, int64_t columns) {
    const auto part = weight.narrow(0, first, columns);
    for_each_part(given.count, kBlockRows, [&](int64_t row, int64_t rows) {
      const auto logits = logits_of(given, row, rows, part);
      const CrossEntropyForward params = {first,
                                          columns,
                                          logits.const_data_ptr<float>(),
                                          bias ? floats(bias) + first : nullptr,
                                          label + row,
                                          highest + row,
                                          sums + row,
                                          own.mutable_data_ptr<float>() + row};
      parallel_for(rows, grain_rows(columns), [&](int64_t begin, int64_t end) {
        k.cross_entropy_forward(params, begin, end);
      });
    });
  };
  together([&] { for_each_part(classes, kPartClasses, part_of_classes); });
  const int32_t* place = order.const_data_ptr<int32_t>();
  float* loss = losses.mutable_data_ptr<float>();
  double sum = 0.0;
  for (int64_t i = 0; i < given.count; ++i) {
    const float distance = own.const_data_ptr<float>()[i] - highest[i];
    sum += loss[place[i]] = (float)(std::log((double)sums[i]) - distance);
  }
  if (reduction == "none") return {losses, statistics, order};
  const double divisor = mean ? (double)std::max<int64_t>(1, given.count) : 1.0;
  auto reduced = empty({}, losses.options());
  *reduced.mutable_data_ptr<float>() = (float)(sum / divisor);
  return {reduced, statistics, order};
}

namespace {

// Returns, for each labelled row, the gradient of the result with respect to the loss of this row,
// multiplied by dloss.
at::Tensor scales(const at::Tensor& dloss, const Labelled& given, const std::string& reduction) {
  const auto gradient = dloss.to(at::kFloat);
  if (reduction == "none") return gradient.index_select(0, given.rows);
  const double divisor = reduction == "mean" ? (double)std::max<int64_t>(1, given.count) : 1.0;
  return gradient.div(divisor).expand({given.count}).contiguous();
}

// The backward pass of one call, with its operands and its results.
class Backward {
 public:
  Backward(const at::Tensor& hidden, const at::Tensor& weight_in, const OptionalTensor& bias_in,
           const Labelled& labelled, const at::Tensor& statistics_in, const at::Tensor& scale_in)
      : given(labelled),
        weight(weight_in),
        bias(as_float(bias_in)),
        scale(scale_in),
        statistics(statistics_in.contiguous()),
        highest(statistics.const_data_ptr<float>()),
        sums(highest + hidden.size(0)),
        dhidden(zeros({given.count, hidden.size(1)}, statistics.options())),
        dweight(empty(weight.sizes(), weight.options())),
        dbias(zeros({bias ? weight.size(0) : 0}, statistics.options())) {}

  void part(int64_t first, int64_t columns) {
    const auto classes = weight.narrow(0, first, columns);
    auto result = dweight.narrow(0, first, columns);
    if (given.count == 0) {
      result.zero_();
      return;
    }
    // If `result` has 16 bits and is a sum over several blocks of rows, the blocks are added in
    // fp32, and the sum is rounded once at the end.
    const bool direct = given.count <= kBlockRows || result.scalar_type() == at::kFloat;
    const auto sum = direct ? result : empty(result.sizes(), statistics.options());
    for_each_part(given.count, kBlockRows, [&](int64_t row, int64_t rows) {
      const auto dlogits = gradient(first, row, logits_of(given, row, rows, classes));
      const auto into = dhidden.narrow(0, row, rows);
      matmul_into(into, dlogits.scalar_type(), dlogits, classes, into);
      const auto before = row == 0 ? std::nullopt : OptionalTensor(sum);
      matmul_into(sum, dlogits.scalar_type(), dlogits.t(), given.hidden.narrow(0, row, rows),
                  before);
    });
    if (!direct) result.copy_(sum);
  }

  const Labelled& given;
  const at::Tensor weight;
  const OptionalTensor bias;
  const at::Tensor scale, statistics;
  const float *highest, *sums;
  at::Tensor dhidden, dweight, dbias;

 private:
  // Returns the gradient of a block of logits in the dtype of the hidden states, and adds the sum
  // of the gradient over the rows to dbias.
  at::Tensor gradient(int64_t first, int64_t row, at::Tensor logits) {
    const int64_t rows = logits.size(0), columns = logits.size(1);
    const bool round = given.hidden.scalar_type() != at::kFloat;
    auto rounded = round ? empty({rows, columns}, given.hidden.options()) : logits;
    const CrossEntropyBackward params = {format_of(given.hidden),
                                         first,
                                         columns,
                                         logits.mutable_data_ptr<float>(),
                                         bias ? floats(bias) + first : nullptr,
                                         given.labels.const_data_ptr<int64_t>() + row,
                                         highest + row,
                                         sums + row,
                                         scale.const_data_ptr<float>() + row,
                                         round ? rounded.mutable_data_ptr() : nullptr};
    const Kernels& k = kernels();
    parallel_for(rows, grain_rows(columns),
                 [&](int64_t begin, int64_t end) { k.cross_entropy_backward(params, begin, end); });
    if (bias) add_bias_gradient(k, logits, first);
    return rounded;
  }

  void add_bias_gradient(const Kernels& k, const at::Tensor& dlogits, int64_t first) {
    const int64_t rows = dlogits.size(0), columns = dlogits.size(1);
    const int64_t starts[] = {0, rows}, target = 0;
    auto sum = empty({columns}, dlogits.options());
    const SegmentSums params = {
        Format::f32, Format::f32, columns, dlogits.const_data_ptr(), columns,
        nullptr,     starts,      &target, sum.mutable_data_ptr(),   columns};
    parallel_for((columns + kStripColumns - 1) / kStripColumns, grain_rows(kStripColumns * rows),
                 [&](int64_t begin, int64_t end) { k.sum_segments(params, begin, end); });
    dbias.narrow(0, first, columns).add_(sum);
  }
};

// Checks the tensors that the forward returned for the backward.
void check_kept(const at::Tensor& statistics, const at::Tensor& order, const at::Tensor& hidden) {
  const int64_t total = hidden.size(0);
  check_floats("statistics", statistics, hidden, {2, total});
  TORCH_CHECK_TYPE(order.scalar_type() == at::kInt, "order: got dtype ", order.scalar_type(),
                   ", allowed: Int");
  check_shape("order", order, {total + 1});
}

// Checks the labels again, because they may have changed since the forward pass.
void check_labels(const at::Tensor& labels, int64_t classes) {
  const int64_t* label = labels.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < labels.size(0); ++i) {
    TORCH_CHECK_VALUE(label[i] >= 0 && label[i] < classes, "labels: got ", label[i],
                      " in a labelled row, allowed: 0 to ", classes - 1);
  }
}

void check_gradient(const at::Tensor& dloss, const std::string& reduction, int64_t total) {
  TORCH_CHECK_TYPE(at::isFloatingType(dloss.scalar_type()), "dloss: got dtype ",
                   dloss.scalar_type(), ", allowed: a floating dtype");
  const bool each = reduction == "none";
  TORCH_CHECK_VALUE(each ? dloss.dim() == 1 && dloss.size(0) == total : dloss.dim() == 0,
                    "dloss: got shape ", dloss.sizes(), ", allowed: the shape of the loss, ",
                    each ? "(" + std::to_string(total) + ",)" : std::string("()"));
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_cross_entropy_backward(
    const at::Tensor& dloss, const at::Tensor& hidden, const at::Tensor& weight,
    const OptionalTensor& bias, const at::Tensor& labels, const at::Tensor& statistics,
    const at::Tensor& order, const std::string& reduction) {
  check_projection(hidden, weight, bias, labels);
  check_reduction(reduction);
  const int64_t total = hidden.size(0);
  check_kept(statistics, order, hidden);
  check_gradient(dloss, reduction, total);
  const Labelled given(hidden, private_copy(labels, at::kLong), private_copy(order, at::kLong));
  check_labels(given.labels, weight.size(0));
  Backward backward(hidden, weight, bias, given, statistics, scales(dloss, given, reduction));
  together([&] {
    for_each_part(weight.size(0), kPartClasses,
                  [&](int64_t first, int64_t columns) { backward.part(first, columns); });
  });
  auto dhidden = zeros({total, hidden.size(1)}, hidden.options());
  dhidden.index_copy_(0, given.rows, backward.dhidden.to(hidden.scalar_type()));
  const auto dbias = bias ? backward.dbias.to(bias->scalar_type()) : empty({0}, hidden.options());
  return {dhidden, backward.dweight, dbias};
}

}  // namespace fastbert::cpu
