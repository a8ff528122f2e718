// The operators for the embedding of BERT's input on the CPU. One pass gathers and sums the rows of
// the tables and applies layer norm and dropout. The backward computes the gradients of the tables.

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <vector>

#include "../isa/dispatch.h"
#include "../operands.h"
#include "../operators.h"

namespace fastbert::cpu {
namespace {

constexpr int kTables = 3;
constexpr const char* kIndexNames[kTables] = {"ids", "token_types", "positions"};
constexpr const char* kTableNames[kTables] = {"word_table", "type_table", "position_table"};

// The indices and tables of the forward and the backward, checked and in the form that the kernels
// read.
struct Operands {
  // The tensors of an absent table are undefined.
  std::array<at::Tensor, kTables> indices, tables;
  int64_t tokens, columns;

  Operands(const std::array<OptionalTensor, kTables>& indices_in,
           const std::array<OptionalTensor, kTables>& tables_in)
      : tokens(indices_in[0]->numel()) {
    const at::Tensor& words = *tables_in[0];
    check_matrix(kTableNames[0], words);
    columns = words.size(1);
    for (int i = 0; i < kTables; ++i) {
      if (!check_pair(i, indices_in[i].has_value(), tables_in[i].has_value())) continue;
      const at::Tensor& table = *tables_in[i];
      check_device(kTableNames[i], table, words);
      check_dtype_of(kTableNames[i], table, words.scalar_type(), "word_table");
      TORCH_CHECK_VALUE(table.dim() == 2 && table.size(1) == columns, kTableNames[i],
                        ": got shape ", table.sizes(), ", allowed: (rows, ", columns, ")");
      tables[i] = fastbert::with_unit_columns(table);
      check_numbers(kIndexNames[i], *indices_in[i], words, tokens);
      indices[i] = private_copy(*indices_in[i], at::kLong);
      check_range(kIndexNames[i], indices[i], table.size(0));
    }
  }

  Lookup lookup() const {
    Lookup result = {};
    for (int i = 0; i < kTables; ++i) {
      if (!tables[i].defined()) continue;
      result.indices[result.count] = indices[i].const_data_ptr<int64_t>();
      result.tables[result.count++] = matrix(tables[i]);
    }
    return result;
  }

 private:
  // Checks that table i and its indices are both present or both absent, and returns whether they
  // are present.
  static bool check_pair(int i, bool has_index, bool has_table) {
    TORCH_CHECK_VALUE(has_index || !has_table, kIndexNames[i], ": got None with ", kTableNames[i],
                      ", allowed: both or neither");
    TORCH_CHECK_VALUE(has_table || !has_index, kTableNames[i], ": got None with ", kIndexNames[i],
                      ", allowed: both or neither");
    return has_table;
  }

  static void check_range(const char* name, const at::Tensor& index, int64_t rows) {
    const int64_t* numbers = index.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < index.numel(); ++i) {
      TORCH_CHECK_INDEX(numbers[i] >= 0 && numbers[i] < rows, name, ": got ", numbers[i],
                        ", allowed: 0 to ", rows - 1);
    }
  }
};

// Computes the gradient of one table. The tokens are sorted by table row; tokens with the same
// table row keep their order. The gradients of tokens with the same table row are summed. All other
// rows of the result, and row number `skipped`, are 0. Each task writes adjacent rows of the table.
at::Tensor table_gradient(const Kernels& k, const at::Tensor& dsum, const at::Tensor& index,
                          const at::Tensor& table, int64_t skipped) {
  const int64_t rows = table.size(0), columns = table.size(1), tokens = index.numel();
  auto gradient = empty({rows, columns}, table.options());
  const int64_t* numbers = index.const_data_ptr<int64_t>();
  std::vector<int64_t> places(rows + 1, 0), order(tokens), starts, targets;
  for (int64_t i = 0; i < tokens; ++i) ++places[numbers[i] + 1];
  for (int64_t row = 0; row < rows; ++row) {
    if (places[row + 1] > 0) {
      targets.push_back(row);
      starts.push_back(places[row]);
    }
    places[row + 1] += places[row];
  }
  starts.push_back(tokens);
  for (int64_t i = 0; i < tokens; ++i) order[places[numbers[i]]++] = i;
  const SegmentSums params = {
      format_of(dsum), format_of(table), columns,        dsum.const_data_ptr(),       columns,
      order.data(),    starts.data(),    targets.data(), gradient.mutable_data_ptr(), columns};
  const int64_t strips = (columns + kStripColumns - 1) / kStripColumns;
  char* out = (char*)gradient.mutable_data_ptr();
  const int64_t bytes = columns * (int64_t)table.element_size();
  const int64_t per_task = grain_rows(columns);
  for_each_task((rows + per_task - 1) / per_task, at::get_num_threads(), [&](int64_t task) {
    int64_t row = task * per_task;
    const int64_t last = std::min(rows, row + per_task);
    const auto found = std::lower_bound(targets.begin(), targets.end(), row);
    int64_t segment = found - targets.begin();
    const int64_t first_segment = segment;
    for (; segment < (int64_t)targets.size() && targets[segment] < last; ++segment) {
      std::memset(out + row * bytes, 0, (targets[segment] - row) * bytes);
      row = targets[segment] + 1;
    }
    std::memset(out + row * bytes, 0, (last - row) * bytes);
    k.sum_segments(params, first_segment * strips, segment * strips);
  });
  if (skipped >= 0 && skipped < rows) gradient.select(0, skipped).zero_();
  return gradient;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> embedding_forward(
    const at::Tensor& ids, const OptionalTensor& token_types, const OptionalTensor& positions,
    const at::Tensor& word_table, const OptionalTensor& type_table,
    const OptionalTensor& position_table, const at::Tensor& weight_in,
    const OptionalTensor& bias_in, const OptionalTensor& seed, double eps, double dropout_p) {
  const Operands operands({ids, token_types, positions}, {word_table, type_table, position_table});
  check_parameter("weight", weight_in, word_table);
  if (bias_in) check_parameter("bias", *bias_in, word_table);
  check_dropout(dropout_p, seed, word_table);
  check_eps(eps);
  const auto weight = as_float(weight_in);
  const auto bias = as_float(bias_in);
  const int64_t rows = operands.tokens, columns = operands.columns;
  auto y = empty({rows, columns}, word_table.options());
  auto mean = empty({rows}, y.options().dtype(at::kFloat)), rstd = empty_like(mean);
  const EmbeddingForward params = {format_of(y),
                                   columns,
                                   operands.lookup(),
                                   floats(weight),
                                   floats(bias),
                                   dropout_of(dropout_p, seed),
                                   (float)eps,
                                   y.mutable_data_ptr(),
                                   mean.mutable_data_ptr<float>(),
                                   rstd.mutable_data_ptr<float>()};
  const Kernels& k = kernels();
  parallel_for(rows, grain_rows(columns), [&](int64_t begin, int64_t end) {
    k.embedding_forward(params, begin, end, row_scratch(k, columns));
  });
  return {y, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> embedding_backward(
    const at::Tensor& dy_in, const at::Tensor& ids, const OptionalTensor& token_types,
    const OptionalTensor& positions, const at::Tensor& word_table, const OptionalTensor& type_table,
    const OptionalTensor& position_table, const at::Tensor& weight_in, const at::Tensor& mean_in,
    const at::Tensor& rstd_in, const OptionalTensor& seed, bool has_bias, double dropout_p,
    int64_t padding_idx) {
  const Operands operands({ids, token_types, positions}, {word_table, type_table, position_table});
  const int64_t rows = operands.tokens, columns = operands.columns;
  check_parameter("weight", weight_in, word_table);
  check_dropout(dropout_p, seed, word_table);
  check_device("dy", dy_in, word_table);
  check_dtype_of("dy", dy_in, word_table.scalar_type(), "word_table");
  check_shape("dy", dy_in, {rows, columns});
  check_statistic("mean", mean_in, dy_in);
  check_statistic("rstd", rstd_in, dy_in);
  const auto dy = fastbert::with_unit_columns(dy_in), weight = as_float(weight_in);
  const auto mean = mean_in.contiguous(), rstd = rstd_in.contiguous();
  auto dsum = empty({rows, columns}, mean.options());
  const EmbeddingBackward params = {format_of(dy),
                                    columns,
                                    operands.lookup(),
                                    matrix(dy),
                                    floats(weight),
                                    floats(mean),
                                    floats(rstd),
                                    has_bias,
                                    dropout_of(dropout_p, seed),
                                    dsum.mutable_data_ptr<float>()};
  const Kernels& k = kernels();
  const auto totals = sum_by_chunks(
      k, rows, columns, (1 + has_bias) * columns, [&](int64_t begin, int64_t end, double* partial) {
        k.embedding_backward(params, begin, end, row_scratch(k, columns), partial);
      });
  const auto total = [&](int64_t i) {
    return totals.narrow(0, i * columns, columns).to(weight_in.scalar_type(), false, true);
  };
  const auto gradient = [&](int i, int64_t skipped) {
    const at::Tensor& table = operands.tables[i];
    return table.defined() ? table_gradient(k, dsum, operands.indices[i], table, skipped)
                           : empty({0}, word_table.options());
  };
  return {gradient(0, padding_idx), gradient(1, -1), gradient(2, -1), total(0),
          has_bias ? total(1) : empty({0}, weight_in.options())};
}

}  // namespace fastbert::cpu
