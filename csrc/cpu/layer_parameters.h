// The parameters of a layer, in the order of LayerWeights (fastbert/ops/layer_weights.py).

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace fastbert::cpu {

// Each linear layer has one or more weights, followed by the same number of biases. Each norm has a
// weight and a bias. A tensor without elements stands for an absent weight or bias. A layer has
// `projections` weights, which compute q, k and v in this order, and `inner_projections` weights
// for the first product of the feed-forward.
struct LayerParameters {
  const at::Tensor *qkv, *projection, *first_norm, *inner, *outer, *second_norm;

  LayerParameters(const at::Tensor* first, int64_t projections, int64_t inner_projections)
      : qkv(first),
        projection(qkv + 2 * projections),
        first_norm(projection + 2),
        inner(first_norm + 2),
        outer(inner + 2 * inner_projections),
        second_norm(outer + 2) {}

  static size_t count(int64_t projections, int64_t inner_projections) {
    return 2 * (size_t)(projections + inner_projections) + 8;
  }
};

inline std::optional<at::Tensor> present(const at::Tensor& t) {
  return t.numel() == 0 ? std::nullopt : std::optional<at::Tensor>(t);
}

inline bool is_gated(const std::string& activation) {
  return activation == "geglu" || activation == "geglu_tanh" || activation == "swiglu";
}

}  // namespace fastbert::cpu
