// The CPU operators as C++ functions, for one another: an encoder layer is one call that uses them
// all.

#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>

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

// a b + addend, in `dtype` as the addend is: a (M, K), b (K, N) of a's dtype or fp32, any strides.
at::Tensor matmul(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& addend,
                  at::ScalarType dtype);

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
    const OptionalTensor& residual, const OptionalTensor& x_bias, const OptionalTensor& seed,
    double dropout_p, double eps);

// softmax(q kᵀ scale + bias) v and its log-sum-exp, fp32. q (B, H, Lq, D), k and v (B, H, Lk, D),
// any strides; or packed (T, H, D) with cu_seqlens int32 (B + 1,), rows beyond the last of which
// give 0. mask bool and bias floating, 4-D and broadcastable to (B, H, max_q, max_k). out lies as
// (B, Lq, H, D), so that merging heads is free; lse (B, H, Lq) or (H, Tq).
std::tuple<at::Tensor, at::Tensor> attention_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask,
    const OptionalTensor& bias, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, const OptionalTensor& seed, int64_t max_seqlen_q,
    int64_t max_seqlen_k, double dropout_p, double scale, int64_t left, int64_t right);

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

// Layer norm, and dropout, of the sum of three rows, one of each table: y, mean and rstd.
std::tuple<at::Tensor, at::Tensor, at::Tensor> embedding_forward(
    const at::Tensor& ids, const at::Tensor& token_types, const at::Tensor& positions,
    const at::Tensor& word_table, const at::Tensor& type_table, const at::Tensor& position_table,
    const at::Tensor& weight, const at::Tensor& bias, const OptionalTensor& seed, double eps,
    double dropout_p);

}  // namespace fastbert::cpu
