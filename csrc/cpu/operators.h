// The CPU operators as C++ functions. operators.cpp registers the functions, and its schemas name
// their results. Some operators call one another.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../checks.h"

namespace fastbert::cpu {

// Returns activation(x Wᵀ + bias) + residual and the pre-activation x Wᵀ + bias, which is empty
// unless `save` is true. x is (M, K), bias is (N,) and residual is (M, N). W is `weight`, which is
// (N, K) and has the dtype of x or fp32.
std::tuple<at::Tensor, at::Tensor> linear(const at::Tensor& x, const at::Tensor& weight,
                                          const OptionalTensor& bias,
                                          const OptionalTensor& residual,
                                          const std::string& activation, bool save);

// Computes `linear` for an x that has the dtype `dtype` or fp32. The operands of the product are
// rounded to `dtype`, and the results have the dtype `dtype`.
std::tuple<at::Tensor, at::Tensor> linear_in(at::ScalarType dtype, const at::Tensor& x,
                                             const at::Tensor& weight, const OptionalTensor& bias,
                                             const OptionalTensor& residual,
                                             const std::string& activation, bool save);

// Returns activation(x Wᵀ + b), where W is the concatenation of `weights` along the outputs, and b
// is the concatenation of `biases`. The weights are read where they are stored. No copy outlives a
// call, so the next call sees every change of a weight. `biases` is empty or as long as `weights`.
at::Tensor linear_of_parts(const at::Tensor& x, at::TensorList weights, at::TensorList biases,
                           const std::string& activation);

// Computes `linear_of_parts` in `dtype`, with the rounding of `linear_in`.
at::Tensor parts_in(at::ScalarType dtype, const at::Tensor& x, at::TensorList weights,
                    at::TensorList biases, const std::string& activation);

// Returns LN(x Wᵀ + bias + residual) in the dtype of the residual, where LN is layer norm. This
// dtype is the dtype of x or fp32.
at::Tensor linear_layer_norm(const at::Tensor& x, const at::Tensor& weight,
                             const OptionalTensor& bias, const at::Tensor& residual,
                             const at::Tensor& norm_weight, const at::Tensor& norm_bias,
                             double eps);

// Returns LN(activation(x Wᵢᵀ + bᵢ) Wₒᵀ + bₒ + residual) in the dtype of the residual. Wᵢ and bᵢ
// are `inner` and `inner_bias`, and Wₒ and bₒ are `outer` and `outer_bias`. The result has the same
// bits as `linear` followed by `linear_layer_norm`. If the number of rows of `inner` is a multiple
// of 32, the activations are stored only as the packed operand of the second product.
at::Tensor feed_forward_layer_norm(const at::Tensor& x, const at::Tensor& inner,
                                   const OptionalTensor& inner_bias, const at::Tensor& outer,
                                   const OptionalTensor& outer_bias, const at::Tensor& residual,
                                   const at::Tensor& norm_weight, const at::Tensor& norm_bias,
                                   const std::string& activation, double eps);

// Computes `feed_forward_layer_norm` in `dtype`, with the rounding of `linear_in`.
at::Tensor feed_forward_in(at::ScalarType dtype, const at::Tensor& x, const at::Tensor& inner,
                           const OptionalTensor& inner_bias, const at::Tensor& outer,
                           const OptionalTensor& outer_bias, const at::Tensor& residual,
                           const at::Tensor& norm_weight, const at::Tensor& norm_bias,
                           const std::string& activation, double eps);

// Returns activation(q(x) Wᵀ + bias) + residual in `dtype`, which is also the dtype of the
// residual. q(x) is x after quantisation, and x is (M, K). W is `packed`, a prepacked int8 weight
// with n outputs. `scale` and `column_sum` have one element for each column of `packed`, including
// the padding.
at::Tensor int8_linear(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scale,
                       const at::Tensor& column_sum, int64_t n, const OptionalTensor& bias,
                       const OptionalTensor& residual, const std::string& activation,
                       at::ScalarType dtype);

// Returns two numbers that describe a prepacked int8 weight: the number of columns in a panel, and
// the number of consecutive elements of a column in a group.
std::tuple<int64_t, int64_t> int8_layout();

// Returns a b + addend in `dtype`, which is also the dtype of the addend. a is (M, K). b is (K, N)
// and has the dtype of a or fp32. Both may have any strides.
at::Tensor matmul(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& addend,
                  at::ScalarType dtype);

// Writes a b + addend to `out` (M, N), without checks. The elements of a row of `out` must be
// contiguous. The operands are in `dtype` or fp32 and are rounded to `dtype`. The addend may be
// absent or `out` itself, and otherwise has the dtype of `out`.
void matmul_into(const at::Tensor& out, at::ScalarType dtype, const at::Tensor& a,
                 const at::Tensor& b, const OptionalTensor& addend);

// Returns y = LN(residual + dropout(x + x_bias)), where LN is layer norm, and for each row of the
// sum its mean and rstd, the reciprocal of its standard deviation. The residual has the dtype of x
// or fp32, and y has the dtype of the residual.
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward(
    const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
    const OptionalTensor& residual, const OptionalTensor& x_bias, const OptionalTensor& seed,
    double dropout_p, double eps);

// Returns the gradients of the sum residual + dropout(x + x_bias), and of x, weight, bias and
// x_bias. The gradient of the sum has the dtype of the residual. The gradient of x is empty without
// dropout, and the gradient of an absent bias is empty.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& mean,
    const at::Tensor& rstd, const OptionalTensor& residual, const OptionalTensor& x_bias,
    const OptionalTensor& seed, bool has_bias, double dropout_p);

std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& x, const at::Tensor& weight,
                                                    const OptionalTensor& residual, double eps);

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& dy, const at::Tensor& x,
                                                     const at::Tensor& weight,
                                                     const at::Tensor& rstd,
                                                     const OptionalTensor& residual);

// Returns a copy of x (tokens, H, D) in which the first `heads` heads are rotated by the angles
// whose cosines and sines are `cos` and `sin` (tokens, D / 2). If `inverse` is true, these heads
// are rotated by the negative angles.
at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int64_t heads,
                  bool inverse);

// Does the same as `rotary`, but overwrites x, which must be contiguous.
void rotate_in_place(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                     int64_t heads, bool inverse);

// Returns dropout(softmax(q kᵀ scale + bias)) v and, in fp32, the log-sum-exp of each row of
// logits. q is (B, H, Lq, D), k and v are (B, H, Lk, D), and all may have any strides. In a packed
// batch, they are (T, H, D) with cu_seqlens in int32 (B + 1,), and the result is 0 in rows after
// the last sequence. `mask` is bool and `bias` floating; both are 4-D and broadcastable to (B, H,
// max_q, max_k). The memory order of a dense result is (B, Lq, H, D), so that heads can be merged
// without a copy. The log-sum-exp is (B, H, Lq) or, in a packed batch with Tq query rows, (H, Tq).
std::tuple<at::Tensor, at::Tensor> attention_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask,
    const OptionalTensor& bias, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, const OptionalTensor& seed, int64_t max_seqlen_q,
    int64_t max_seqlen_k, double dropout_p, double scale, int64_t left, int64_t right);

// Writes the gradients of q, k and v to dq, dk and dv. If dbias is not None, the gradient of the
// bias is written to dbias, which must have the shape of the bias.
void attention_backward(const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                        const OptionalTensor& dbias, const at::Tensor& dout, const at::Tensor& q,
                        const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask,
                        const OptionalTensor& bias, const OptionalTensor& cu_seqlens_q,
                        const OptionalTensor& cu_seqlens_k, const OptionalTensor& seed,
                        int64_t max_seqlen_q, int64_t max_seqlen_k, double dropout_p, double scale,
                        int64_t left, int64_t right);

// Returns the softmax weights of the heads in `heads` and the queries in `rows`, where None stands
// for all heads or all queries. The result is (B, number of heads, number of rows, max_seqlen_k).
at::Tensor attention_weights(const at::Tensor& q, const at::Tensor& k, const OptionalTensor& mask,
                             const OptionalTensor& bias, const OptionalTensor& cu_seqlens_q,
                             const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q,
                             int64_t max_seqlen_k, at::OptionalIntArrayRef heads,
                             at::OptionalIntArrayRef rows, double scale, int64_t left,
                             int64_t right);

// The arguments of attention with terms of relative positions, after q, k and v. `index` is int32
// (2 N - 1,) with the row of each distance. The tables of keys and queries are (positions, H, D)
// and the bias is (positions, H). The segments are int32 or int64, (B, L) or (T,), and the segment
// scores are (B, H, Lq) or (Tq, H).
struct RelativeArguments {
  const at::Tensor& index;
  const OptionalTensor &position_keys, &position_queries, &position_bias;
  const OptionalTensor &q_segments, &k_segments, &segment_scores;
};

#define FASTBERT_RELATIVE_ARGUMENTS                                                             \
  const at::Tensor &index, const OptionalTensor &position_keys,                                 \
      const OptionalTensor &position_queries, const OptionalTensor &position_bias,              \
      const OptionalTensor &q_segments, const OptionalTensor &k_segments,                       \
      const OptionalTensor &segment_scores, const OptionalTensor &mask,                         \
      const OptionalTensor &cu_seqlens_q, const OptionalTensor &cu_seqlens_k,                   \
      const OptionalTensor &seed, int64_t max_seqlen_q, int64_t max_seqlen_k, double dropout_p, \
      double scale

#define FASTBERT_RELATIVE_SCHEMA                                                           \
  "Tensor index, Tensor? position_keys, Tensor? position_queries, Tensor? position_bias, " \
  "Tensor? q_segments, Tensor? k_segments, Tensor? segment_scores, Tensor? mask, "         \
  "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, int max_seqlen_q, "           \
  "int max_seqlen_k, float dropout_p, float scale"

#define FASTBERT_RELATIVE_VALUES                                                                   \
  {index, position_keys, position_queries, position_bias, q_segments, k_segments, segment_scores}, \
      {mask,         std::nullopt, cu_seqlens_q, cu_seqlens_k, seed, max_seqlen_q,                 \
       max_seqlen_k, dropout_p,    scale,        -1,           -1}

// Returns dropout(softmax((q kᵀ + terms) scale)) v, with the terms of relative positions of
// isa/kernels.h. The layouts are those of attention_forward.
at::Tensor relative_attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      FASTBERT_RELATIVE_ARGUMENTS);

// Returns the softmax weights of relative_attention_forward, before dropout.
at::Tensor relative_attention_weights(const at::Tensor& q, const at::Tensor& k,
                                      FASTBERT_RELATIVE_ARGUMENTS);

// Returns the gradients of q, k, v, the tables of keys and queries, the bias and the segment
// scores. The gradient of an absent argument is empty.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
relative_attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, FASTBERT_RELATIVE_ARGUMENTS);

// Computes self-attention without dropout. Each row of `qkv` (T, 3 H D) has q, k and v one after
// another. The rows are packed sequences, or `batch` sequences of `max_seqlen` rows. The result is
// (T, H D).
at::Tensor attention_of_rows(const at::Tensor& qkv, int64_t heads, const OptionalTensor& mask,
                             const OptionalTensor& bias, const OptionalTensor& cu_seqlens,
                             int64_t batch, int64_t max_seqlen, double scale, int64_t left,
                             int64_t right);

// Computes attention_of_rows with terms of relative positions, as relative_attention_forward.
at::Tensor relative_attention_of_rows(const at::Tensor& qkv, int64_t heads,
                                      const RelativeArguments& relative, const OptionalTensor& mask,
                                      const OptionalTensor& cu_seqlens, int64_t batch,
                                      int64_t max_seqlen, double scale);

// Returns f(h + bias) with the shape of h (M, N) for "gelu", "gelu_tanh", "relu" and "silu". For
// the gated "geglu", "geglu_tanh" and "swiglu", h is (M, 2 N) and the result is (M, N).
at::Tensor activation_forward(const at::Tensor& h, const OptionalTensor& bias,
                              const std::string& activation);

// Returns the gradient of h, the gradient of the bias and the activation. The gradient of the bias
// is empty unless `sum_rows` is true. The activation, which the gradient of the next weight needs,
// is empty unless `recompute` is true.
std::tuple<at::Tensor, at::Tensor, at::Tensor> activation_backward(const at::Tensor& dy,
                                                                   const at::Tensor& h,
                                                                   const OptionalTensor& bias,
                                                                   const std::string& activation,
                                                                   bool sum_rows, bool recompute);

// Sums one row of each table for every token, and applies layer norm and dropout. Returns the
// result y, and for each sum its mean and rstd, the reciprocal of its standard deviation. If a
// table is absent, its indices are absent too.
std::tuple<at::Tensor, at::Tensor, at::Tensor> embedding_forward(
    const at::Tensor& ids, const OptionalTensor& token_types, const OptionalTensor& positions,
    const at::Tensor& word_table, const OptionalTensor& type_table,
    const OptionalTensor& position_table, const at::Tensor& weight, const OptionalTensor& bias,
    const OptionalTensor& seed, double eps, double dropout_p);

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> embedding_backward(
    const at::Tensor& dy, const at::Tensor& ids, const OptionalTensor& token_types,
    const OptionalTensor& positions, const at::Tensor& word_table, const OptionalTensor& type_table,
    const OptionalTensor& position_table, const at::Tensor& weight, const at::Tensor& mean,
    const at::Tensor& rstd, const OptionalTensor& seed, bool has_bias, double dropout_p,
    int64_t padding_idx);

// Returns the loss and, for the backward pass, the statistics of the rows and the order of the
// rows, in which the labelled rows come first. The weight has the dtype of the hidden states or
// fp32, and is rounded to their dtype.
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_cross_entropy_forward(
    const at::Tensor& hidden, const at::Tensor& weight, const OptionalTensor& bias,
    const at::Tensor& labels, int64_t ignore_index, const std::string& reduction);

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_cross_entropy_backward(
    const at::Tensor& dloss, const at::Tensor& hidden, const at::Tensor& weight,
    const OptionalTensor& bias, const at::Tensor& labels, const at::Tensor& statistics,
    const at::Tensor& order, const std::string& reduction);

// Returns y (B, V), the maximum of log(1 + relu(hidden Wᵀ + bias)) over the rows of each sequence.
// W is `weight`, which is (V, K) and has the dtype of `hidden` or fp32. `cu_seqlens` is int32 (B +
// 1,). With `save`, also returns the largest logits in fp32 and their rows in int32, both (B, V). A
// row is -1 if the logit is not positive.
std::tuple<at::Tensor, at::Tensor, at::Tensor> splade_forward(const at::Tensor& hidden,
                                                              const at::Tensor& weight,
                                                              const OptionalTensor& bias,
                                                              const at::Tensor& cu_seqlens,
                                                              bool save);

std::tuple<at::Tensor, at::Tensor, at::Tensor> splade_backward(
    const at::Tensor& dy, const at::Tensor& hidden, const at::Tensor& weight,
    const OptionalTensor& bias, const at::Tensor& logits, const at::Tensor& rows);

// Returns whether any element of `index` is outside [0, size) and is not `ignored`.
bool any_outside(const at::Tensor& index, int64_t size, std::optional<int64_t> ignored);

// Takes a mask (B, L) that is nonzero for real tokens. Returns the indices of these tokens in the
// flattened batch, the cumulative lengths of the sequences and the length of the longest sequence.
std::tuple<at::Tensor, at::Tensor, int64_t> unpad_indices(const at::Tensor& mask);

// Returns a tensor (rows, ...) whose row indices[i] is values[i], and whose other rows are 0.
at::Tensor scatter_rows(const at::Tensor& values, const at::Tensor& indices, int64_t rows);

// Runs a whole stack of encoder layers, for inference. `rotations` is empty or holds cosines and
// sines for each layer. `windows` is empty or holds, for each layer, the largest distance between a
// query and a key, where -1 means no limit. `positions` is empty or holds, for each layer, the
// index and both tables of relative_attention_forward; a table is (positions, N), and has no
// elements if it is absent. `heads / key_value_heads` consecutive heads of q share a head of k and
// of v. `scale` is the factor of the logits, or None for D ** -0.5. Returns the
// last hidden state, or all hidden states with `all_states`.
std::vector<at::Tensor> encoder(at::Tensor hidden, at::TensorList parameters, at::TensorList scales,
                                const OptionalTensor& cu_seqlens, const OptionalTensor& mask,
                                const OptionalTensor& bias, at::TensorList rotations,
                                at::IntArrayRef windows, at::TensorList positions,
                                std::optional<double> scale, int64_t batch, int64_t max_seqlen,
                                int64_t heads, int64_t key_value_heads, int64_t projections,
                                int64_t inner_projections, bool pre_norm, bool rms_norm, double eps,
                                const std::string& activation, at::ScalarType dtype,
                                bool all_states);

// Runs all layers of a decoder for one new token of each hypothesis, for inference. hidden is (R,
// N). `parameters` has 18 tensors for each layer, each weight followed by its bias, which may be
// empty: q, k and v of self-attention in one projection, its output projection, layer norm; q of
// cross-attention, its output projection, layer norm; both projections of the feed-forward, layer
// norm. `cache` is (layers, 2, slots, H, positions, D) for keys and values. The keys and values of
// row i are written to slot i at `position`, and those of an earlier position j are in slot
// slots[i, j]. `source_cache` is (layers, 2, H, S, D) for the keys and values of the packed
// sources, whose cumulative lengths are `cu_seqlens`, and sources[i] is the source of row i.
at::Tensor decoder_step(const at::Tensor& hidden, at::TensorList parameters,
                        const at::Tensor& cache, const at::Tensor& slots, int64_t position,
                        const at::Tensor& source_cache, const at::Tensor& cu_seqlens,
                        const at::Tensor& sources, int64_t heads, bool pre_norm, double eps,
                        const std::string& activation);

// Returns the sum (N,) of the rows of x (M, N) in fp32.
at::Tensor sum_rows(const at::Tensor& x);

// Runs one layer in training. Rows and parameters are fp32, and the operands of products and of
// attention are rounded to `dtype`. Returns the result of the layer, followed by the tensors that
// the backward reads. `chosen` is None, or holds the ascending indices of the rows that are
// queries. In the second case, the result has only these rows. `seeds` and `dropouts` belong to the
// attention weights, the attention output and the feed-forward; without dropout, `seeds` is empty.
// `rotation` holds cosines and sines, or is empty.
std::vector<at::Tensor> layer_forward(const at::Tensor& hidden, at::TensorList parameters,
                                      const OptionalTensor& chosen,
                                      const OptionalTensor& cu_seqlens_q,
                                      const OptionalTensor& cu_seqlens_k, at::TensorList seeds,
                                      at::TensorList rotation, at::ArrayRef<double> dropouts,
                                      int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t batch,
                                      int64_t heads, int64_t projections, int64_t inner_projections,
                                      int64_t window, bool pre_norm, double eps,
                                      const std::string& activation, at::ScalarType dtype);

// Returns the gradients of `hidden` and of the parameters. `kept` holds the tensors that
// layer_forward returned for the backward. The gradient of an absent parameter is empty.
std::vector<at::Tensor> layer_backward(
    const at::Tensor& dy, const at::Tensor& hidden, at::TensorList parameters, at::TensorList kept,
    const OptionalTensor& chosen, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, at::TensorList seeds, at::TensorList rotation,
    at::ArrayRef<double> dropouts, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t batch,
    int64_t heads, int64_t projections, int64_t inner_projections, int64_t window, bool pre_norm,
    double eps, const std::string& activation, at::ScalarType dtype);

// Returns whether the products of `rows` rows with the weights in `parameters` are enough work for
// several threads.
bool worth_a_team(int64_t rows, at::TensorList parameters);

// Moves the memory of `weights` to pages of 2 MiB where the operating system can do so.
void use_huge_pages(at::TensorList weights);

// Returns whether the tensors of `a` and `b` have the same dtypes, shapes and bytes.
bool same_bytes(at::TensorList a, at::TensorList b);

// Runs a whole encoder on a batch of token ids, for inference. A padded batch (B, L) has a `mask`
// that is 1 at tokens and 0 at padding. Packed tokens (T,) have the cumulative lengths `cu_seqlens`
// of their sequences instead. `embedding` holds the tables of words and positions, the weight and
// the bias of the layer norm and, if the model has one, the table of token types. `parameters` and
// `scales` are those of `encoder`. `pooler` holds a weight and a bias, or is empty. Positions count
// from 0 over the padded row, or from `first_position` over the tokens without padding. In a packed
// batch, positions count all tokens of a sequence. The first result holds the rows of the tokens,
// the pooled rows if there is a pooler and, if there is padding, the tokens' indices and the
// cumulative lengths. The second result is the length of the longest sequence. The first result is
// empty if the batch has no token, or if a weight does not have the dtype `dtype`. It is also empty
// if the operator cannot process the shapes, dtypes or values of `ids`, `mask`, `token_types` or
// `cu_seqlens`.
std::tuple<std::vector<at::Tensor>, int64_t> bert(
    const at::Tensor& ids, const OptionalTensor& mask, const OptionalTensor& token_types,
    const OptionalTensor& cu_seqlens, at::TensorList embedding, at::TensorList parameters,
    at::TensorList scales, at::TensorList pooler, std::optional<int64_t> first_position,
    int64_t heads, int64_t projections, double embedding_eps, double eps,
    const std::string& activation, at::ScalarType dtype);

}  // namespace fastbert::cpu
