// The head of SPLADE on the CPU: the maximum of log(1 + relu(logit)) over the tokens of each
// sequence.
//
// A task computes the logits of a part of the vocabulary for one block of tokens after another, and
// keeps the running maximum of each class. Only one block of logits per thread is stored. A class
// of a sequence belongs to one task, so its result depends neither on the other sequences nor on
// the number of threads.

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "../attention/operands.h"
#include "../gemm/blocks.h"
#include "../isa/dispatch.h"
#include "../operands.h"
#include "../operators.h"
#include "sums.h"

namespace fastbert::cpu {
namespace {

void check_head(const at::Tensor& hidden, const at::Tensor& weight, const OptionalTensor& bias) {
  check_matrix("hidden", hidden);
  check_device("weight", weight, hidden);
  check_dtype_or_float("weight", weight, hidden.scalar_type(), "hidden");
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(0) >= 1 && weight.size(1) == hidden.size(1),
                    "weight: got shape ", weight.sizes(), ", allowed: (V, ", hidden.size(1),
                    ") with V >= 1");
  if (bias) check_vector("bias", *bias, weight, weight.size(0));
}

// The results of a forward pass. `logits` and `rows` are empty unless they are kept.
struct SpladeResults {
  at::Tensor y, logits, rows;

  SpladeResults(const at::Tensor& hidden, int64_t sequences, int64_t classes, bool save)
      : y(empty({sequences, classes}, hidden.options())),
        logits(empty({0}, hidden.options().dtype(at::kFloat))),
        rows(empty({0}, hidden.options().dtype(at::kInt))) {
    if (!save) return;
    logits = empty(y.sizes(), logits.options());
    rows = empty(y.sizes(), rows.options());
  }

  // Sets the results of sequence b, which has no token.
  void set_empty(int64_t b) {
    y.select(0, b).zero_();
    if (logits.size(0) == 0) return;
    logits.select(0, b).zero_();
    rows.select(0, b).fill_(-1);
  }
};

// Takes the blocks of logits of some classes, in the order of the tokens, and writes the result of
// each sequence after its last token.
class SpladeBlocks {
 public:
  SpladeBlocks(const SpladeResults& results, const int32_t* ends, int64_t sequences,
               const OptionalTensor& bias)
      : ends_(ends),
        sequences_(sequences),
        classes_(results.y.size(1)),
        bias_(floats(bias)),
        format_(format_of(results.y)),
        size_(results.y.element_size()),
        y_((char*)results.y.mutable_data_ptr()),
        save_(results.logits.size(0) > 0),
        logits_(save_ ? results.logits.mutable_data_ptr<float>() : nullptr),
        rows_(save_ ? results.rows.mutable_data_ptr<int32_t>() : nullptr) {}

  // The size of the running maxima and of their rows, for the classes of one block.
  static constexpr int64_t kOwnBytes = kBlockOfColumns * (int64_t)(sizeof(float) + sizeof(int32_t));

  void operator()(const BlockOfSums& block) const {
    float* highest = (float*)block.own;
    int32_t* rows = (int32_t*)(highest + kBlockOfColumns);
    const int64_t end = block.row + block.rows;
    int64_t b = std::upper_bound(ends_, ends_ + sequences_ + 1, block.row) - ends_ - 1;
    for (int64_t row = block.row; row < end; ++b) {
      const int64_t stop = std::min<int64_t>(end, ends_[b + 1]);
      if (stop == row) continue;
      if (row == ends_[b]) {
        std::fill_n(highest, block.columns, -std::numeric_limits<float>::infinity());
        std::fill_n(rows, block.columns, -1);
      }
      const SpladeMaximum params = {block.columns, kBlockOfColumns, block.sums,
                                    block.row,     highest,         rows};
      kernels().splade_maximum(params, row - block.row, stop - block.row);
      if (stop == ends_[b + 1]) finish(block, b, highest, rows);
      row = stop;
    }
  }

 private:
  void finish(const BlockOfSums& block, int64_t b, const float* highest,
              const int32_t* rows) const {
    const int64_t place = b * classes_ + block.column;
    kernels().splade_result({format_, block.columns, highest,
                             bias_ ? bias_ + block.column : nullptr, rows, y_ + place * size_,
                             save_ ? logits_ + place : nullptr, save_ ? rows_ + place : nullptr});
  }

  const int32_t* ends_;
  const int64_t sequences_, classes_;
  const float* bias_;
  const Format format_;
  const int64_t size_;
  char* y_;
  const bool save_;
  float* logits_;
  int32_t* rows_;
};

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> splade_forward(const at::Tensor& hidden,
                                                              const at::Tensor& weight,
                                                              const OptionalTensor& bias_in,
                                                              const at::Tensor& cu_seqlens,
                                                              bool save) {
  check_head(hidden, weight, bias_in);
  check_device("cu_seqlens", cu_seqlens, hidden);
  const auto lengths = checked_lengths("cu_seqlens", cu_seqlens, hidden.size(0), "max_seqlen",
                                       std::numeric_limits<int32_t>::max());
  const int32_t* ends = lengths.const_data_ptr<int32_t>();
  const int64_t sequences = lengths.size(0) - 1;
  const auto bias = as_float(bias_in);
  SpladeResults results(hidden, sequences, weight.size(0), save);
  for (int64_t b = 0; b < sequences; ++b) {
    if (ends[b] == ends[b + 1]) results.set_empty(b);
  }
  for_each_block_of_sums(hidden.narrow(0, 0, ends[sequences]), weight, SpladeBlocks::kOwnBytes,
                         SpladeBlocks(results, ends, sequences, bias));
  return {results.y, results.logits, results.rows};
}

namespace {

// The gradients of the largest logits and the rows of these logits, both transposed to (V, B) and
// without a gradient where the row is -1.
struct SpladeScales {
  at::Tensor scale, rows;

  // `kept` must be a private copy, which no other thread can change.
  SpladeScales(const at::Tensor& dy, const at::Tensor& logits, const at::Tensor& kept,
               int64_t tokens)
      : scale(empty({kept.size(1), kept.size(0)}, logits.options())),
        rows(empty({kept.size(1), kept.size(0)}, kept.options())) {
    const int64_t sequences = kept.size(0), classes = kept.size(1);
    const float *gradient = dy.const_data_ptr<float>(), *logit = logits.const_data_ptr<float>();
    const int32_t* from = kept.const_data_ptr<int32_t>();
    float* to_scale = scale.mutable_data_ptr<float>();
    int32_t* to_row = rows.mutable_data_ptr<int32_t>();
    for (int64_t b = 0; b < sequences; ++b) {
      for (int64_t v = 0; v < classes; ++v) {
        const int64_t i = b * classes + v, j = v * sequences + b;
        TORCH_CHECK_VALUE(from[i] >= -1 && from[i] < tokens, "rows: got ", from[i],
                          ", allowed: -1 to ", tokens - 1);
        to_row[j] = from[i];
        to_scale[j] = from[i] < 0 ? 0.0f : gradient[i] / (1.0f + logit[i]);
      }
    }
  }
};

at::Tensor sums_over_sequences(const at::Tensor& scale) {
  const int64_t classes = scale.size(0), sequences = scale.size(1);
  auto sums = empty({classes}, scale.options());
  const float* from = scale.const_data_ptr<float>();
  float* to = sums.mutable_data_ptr<float>();
  for (int64_t v = 0; v < classes; ++v) {
    double sum = 0.0;
    for (int64_t b = 0; b < sequences; ++b) sum += from[v * sequences + b];
    to[v] = (float)sum;
  }
  return sums;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> splade_backward(
    const at::Tensor& dy, const at::Tensor& hidden_in, const at::Tensor& weight_in,
    const OptionalTensor& bias, const at::Tensor& logits, const at::Tensor& rows) {
  check_head(hidden_in, weight_in, bias);
  TORCH_CHECK_VALUE(dy.dim() == 2, "dy: got shape ", dy.sizes(), ", allowed: (B, V)");
  const int64_t sequences = dy.size(0), classes = weight_in.size(0);
  const int64_t tokens = hidden_in.size(0), columns = hidden_in.size(1);
  check_device("dy", dy, hidden_in);
  check_dtype_of("dy", dy, hidden_in.scalar_type(), "hidden");
  check_shape("dy", dy, {sequences, classes});
  check_floats("logits", logits, hidden_in, {sequences, classes});
  check_device("rows", rows, hidden_in);
  TORCH_CHECK_TYPE(rows.scalar_type() == at::kInt, "rows: got dtype ", rows.scalar_type(),
                   ", allowed: Int");
  check_shape("rows", rows, {sequences, classes});
  const SpladeScales given(dy.to(at::kFloat).contiguous(), logits.contiguous(),
                           private_copy(rows, at::kInt), tokens);
  const auto hidden = fastbert::with_unit_columns(hidden_in);
  const auto weight = fastbert::with_unit_columns(weight_in);
  auto sums = zeros({tokens, columns}, given.scale.options());
  auto dweight = empty(weight.sizes(), weight.options());
  const Kernels& k = kernels();
  SpladeGradient params = {format_of(hidden),
                           format_of(dweight),
                           sequences,
                           classes,
                           columns,
                           tokens,
                           given.scale.const_data_ptr<float>(),
                           given.rows.const_data_ptr<int32_t>(),
                           matrix(hidden),
                           dweight.mutable_data_ptr()};
  parallel_for(classes, grain_rows(sequences * columns + 1),
               [&](int64_t begin, int64_t end) { k.splade_weight_gradient(params, begin, end); });
  params.format = format_of(weight);
  params.out_format = Format::f32;
  params.x = matrix(weight);
  params.out = sums.mutable_data_ptr();
  const int64_t strips = (columns + kSpladeStrip - 1) / kSpladeStrip;
  const int64_t scratch = tokens * kSpladeStrip * (int64_t)sizeof(float);
  parallel_for(strips, grain_rows(sequences * classes * kSpladeStrip + 1),
               [&](int64_t begin, int64_t end) {
                 k.splade_hidden_gradient(params, begin, end, (float*)thread_scratch(scratch));
               });
  const auto dbias = bias ? sums_over_sequences(given.scale).to(bias->scalar_type())
                          : empty({0}, hidden.options());
  return {sums.to(hidden.scalar_type()), dweight, dbias};
}

}  // namespace fastbert::cpu
