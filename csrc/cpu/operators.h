// The CPU operators as C++ functions: for their registration (operators.cpp) and for one another.
// The schemas in operators.cpp name their results.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../checks.h"

namespace fastbert::cpu {

// y = activation(x Wᵀ + bias) + residual, and with `save` the pre-activation (else empty). x (M,
// K), weight (N, K) of x's dtype or fp32, bias (N,), residual (M, N).
std::tuple<at::Tensor, at::Tensor> linear(const at::Tensor& x, const at::Tensor& weight,
                                          const OptionalTensor& bias,
                                          const OptionalTensor& residual,
                                          const std::string& activation, bool save);

// LN(x Wᵀ + bias + residual) in the dtype of the residual, which is that of x or fp32.
at::Tensor linear_layer_norm(const at::Tensor& x, const at::Tensor& weight,
                             const OptionalTensor& bias, const at::Tensor& residual,
                             const at::Tensor& norm_weight, const at::Tensor& norm_bias,
                             double eps);

// activation(q(x) Wᵀ + bias) + residual by integers, in `dtype`, the residual's: x (M, K), packed
// int8 weights with n outputs, scale and column_sum padded as they are.
at::Tensor int8_linear(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scale,
                       const at::Tensor& column_sum, int64_t n, const OptionalTensor& bias,
                       const OptionalTensor& residual, const std::string& activation,
                       at::ScalarType dtype);

// How wide the panels of packed int8 weights are, and how many of k lie together.
std::tuple<int64_t, int64_t> int8_layout();

// a b + addend, in `dtype` as the addend is: a (M, K), b (K, N) of a's dtype or fp32, any strides.
at::Tensor matmul(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& addend,
                  at::ScalarType dtype);

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward(
    const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
    const OptionalTensor& residual, const OptionalTensor& x_bias, const OptionalTensor& seed,
    double dropout_p, double eps);

// Returns the gradients of the sum, x, weight, bias and x_bias. The gradient of x is empty without
// dropout. The gradient of an absent bias is empty.
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

// The first `heads` heads of x (tokens, H, D) rotated by the angles of cos and sin (tokens, D / 2).
at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int64_t heads,
                  bool inverse);

// softmax(q kᵀ scale + bias) v and its log-sum-exp, fp32. q (B, H, Lq, D), k and v (B, H, Lk, D),
// any strides; or packed (T, H, D) with cu_seqlens int32 (B + 1,), rows beyond the last of which
// give 0. mask bool and bias floating, 4-D and broadcastable to (B, H, max_q, max_k). out lies as
// (B, Lq, H, D), so that merging heads is free; lse (B, H, Lq) or (H, Tq).
std::tuple<at::Tensor, at::Tensor> attention_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask,
    const OptionalTensor& bias, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, const OptionalTensor& seed, int64_t max_seqlen_q,
    int64_t max_seqlen_k, double dropout_p, double scale, int64_t left, int64_t right);

// Fills dq, dk, dv and, where it is given, dbias (in the shape of the bias).
void attention_backward(const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                        const OptionalTensor& dbias, const at::Tensor& dout, const at::Tensor& q,
                        const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask,
                        const OptionalTensor& bias, const OptionalTensor& cu_seqlens_q,
                        const OptionalTensor& cu_seqlens_k, const OptionalTensor& seed,
                        int64_t max_seqlen_q, int64_t max_seqlen_k, double dropout_p, double scale,
                        int64_t left, int64_t right);

// The softmax weights (B, heads, rows, max_seqlen_k) of chosen heads and queries.
at::Tensor attention_weights(const at::Tensor& q, const at::Tensor& k, const OptionalTensor& mask,
                             const OptionalTensor& bias, const OptionalTensor& cu_seqlens_q,
                             const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q,
                             int64_t max_seqlen_k, at::OptionalIntArrayRef heads,
                             at::OptionalIntArrayRef rows, double scale, int64_t left,
                             int64_t right);

// Self-attention on qkv (B, L, 3, H, D), or packed (T, 3, H, D), without dropout or a window: out
// contiguous, (B, L, H, D) or (T, H, D).
at::Tensor attention_qkvpacked(const at::Tensor& qkv, const OptionalTensor& mask,
                               const OptionalTensor& cu_seqlens, int64_t max_seqlen, double scale);

// f(h + bias), f "gelu", "gelu_tanh", "relu", or gated "geglu", "swiglu": h (M, 2 N) to (M, N).
at::Tensor activation_forward(const at::Tensor& h, const OptionalTensor& bias,
                              const std::string& activation);

// Gradients of h and, with sum_rows, of its bias; with `recompute` the activation itself (for the
// gradient of the next weight) from the same read of h. The others are empty.
std::tuple<at::Tensor, at::Tensor, at::Tensor> activation_backward(const at::Tensor& dy,
                                                                   const at::Tensor& h,
                                                                   const OptionalTensor& bias,
                                                                   const std::string& activation,
                                                                   bool sum_rows, bool recompute);

// The same for the two forms of GELU, by name: "none" or "tanh".
at::Tensor bias_gelu_forward(const at::Tensor& h, const OptionalTensor& bias,
                             const std::string& approximate);

std::tuple<at::Tensor, at::Tensor> bias_gelu_backward(const at::Tensor& dy, const at::Tensor& h,
                                                      const OptionalTensor& bias,
                                                      const std::string& approximate);

// Sums one row of each table for every token, and applies layer norm and dropout. Returns y, mean
// and rstd. A table and its indices are absent together.
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

// The loss, and for the backward pass the rows' statistics and the order of the labelled ones.
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_cross_entropy_forward(
    const at::Tensor& hidden, const at::Tensor& weight, const OptionalTensor& bias,
    const at::Tensor& labels, int64_t ignore_index, const std::string& reduction);

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_cross_entropy_backward(
    const at::Tensor& dloss, const at::Tensor& hidden, const at::Tensor& weight,
    const OptionalTensor& bias, const at::Tensor& labels, const at::Tensor& statistics,
    const at::Tensor& order, const std::string& reduction);

// Where these tensors (1-D or 2-D) are stored and checksums of their bits: int64, one-dimensional;
// and whether they still have it, as far as a product with so many rows makes it worth reading.
at::Tensor fingerprint(at::TensorList tensors);
bool has_fingerprint(at::TensorList tensors, const at::Tensor& fingerprint, int64_t rows);

// Whether an element lies outside of [0, size) and is not `ignored`.
bool any_outside(const at::Tensor& index, int64_t size, std::optional<int64_t> ignored);

// Of a mask (B, L), nonzero = a token that exists: the tokens' places in the flat batch, the
// cumulative lengths and the longest length.
std::tuple<at::Tensor, at::Tensor, int64_t> unpad_indices(const at::Tensor& mask);

// (rows, ...) with row indices[i] = values[i] and 0 elsewhere.
at::Tensor scatter_rows(const at::Tensor& values, const at::Tensor& indices, int64_t rows);

// A whole stack of encoder layers, for inference: the last hidden state, or all of them.
std::vector<at::Tensor> encoder(at::Tensor hidden, at::TensorList parameters, at::TensorList scales,
                                const OptionalTensor& cu_seqlens, const OptionalTensor& mask,
                                const OptionalTensor& bias, int64_t batch, int64_t max_seqlen,
                                int64_t heads, double eps, const std::string& activation,
                                at::ScalarType dtype, bool all_states);

}  // namespace fastbert::cpu
