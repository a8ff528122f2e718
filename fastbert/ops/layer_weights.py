"""The parameters of one layer of an encoder, by name and in the order of ``ops.encoder``."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

Tensors = tuple[Tensor, ...]


class LayerWeights(NamedTuple):
    """The parameters of a layer; each field is a tuple, because some weights are stored in parts.

    A tensor without elements stands for an absent bias, or for an absent layer norm before
    attention. With int8 weights, the weight of a linear layer is the ``packed`` of an
    ``Int8Weight``.

    Attributes:
        qkv: Weights of the projections whose results, side by side, are q, k and v: one tensor
            ``(3H, H)``, or two or three tensors with H columns and 3H rows in all.
        qkv_bias: Biases of the projections `qkv`.
        projection: Weight ``(H, H)`` of the projection after attention.
        projection_bias: Bias ``(H,)`` of the projection after attention.
        first_norm: Weight ``(H,)`` of the layer norm before or after attention.
        first_norm_bias: Bias ``(H,)`` of the layer norm before or after attention.
        inner: Weights of the first product of the feed-forward: one tensor ``(F, H)``; for a gated
            activation, one tensor ``(2F, H)`` or two tensors ``(F, H)``.
        inner_bias: Biases of the first product.
        outer: Weight ``(H, F)`` of the second product of the feed-forward.
        outer_bias: Bias ``(H,)`` of the second product.
        second_norm: Weight ``(H,)`` of the layer norm before or after the feed-forward.
        second_norm_bias: Bias ``(H,)`` of the layer norm before or after the feed-forward.
    """

    qkv: Tensors
    qkv_bias: Tensors
    projection: Tensors
    projection_bias: Tensors
    first_norm: Tensors
    first_norm_bias: Tensors
    inner: Tensors
    inner_bias: Tensors
    outer: Tensors
    outer_bias: Tensors
    second_norm: Tensors
    second_norm_bias: Tensors

    def flat(self) -> list[Any]:
        """Return all tensors in the order of ``ops.encoder``."""
        return [tensor for field in self for tensor in field]

    def matrices(self) -> Tensors:
        """Return the weights of all matrix products."""
        return (*self.qkv, *self.projection, *self.inner, *self.outer)

    def of_products(self) -> Tensors:
        """Return the weights of all matrix products, and the biases that these products add.

        `projection_bias` and `outer_bias` are left out, because the layer norms add them.
        """
        return tuple(tensor for i in OF_PRODUCTS for tensor in self[i])


# PARAMETERS is the number of tensors of a layer if no weight is stored in parts. OF_PRODUCTS has
# the indices of the fields that `LayerWeights.of_products` returns.
PARAMETERS = len(LayerWeights._fields)
OF_PRODUCTS = tuple(
    LayerWeights._fields.index(name)
    for name in ("qkv", "qkv_bias", "projection", "inner", "inner_bias", "outer")
)
