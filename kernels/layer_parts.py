"""The Triton launchers of attention, feed-forward and layer norm that a layer uses by default.

A launcher is a function that launches the kernels of one operation. A caller may replace the Triton
launchers by launchers of the CUDA C++ kernels, which take the same arguments. The CUDA launchers
are in ``fastbert.ops.layer_parts``, because this package does not import the extension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.kernels import (
    attention,
    attention_backward,
    feed_forward,
    feed_forward_backward,
    layer_norm,
)


class Attention(NamedTuple):
    """The launchers of attention, with the arguments that ``kernels.attention`` documents.

    Attributes:
        forward: Returns out and the log-sum-exp.
        backward: Writes the gradients of q, k and v into the tensors of ``into``.
        allocate: Returns tensors that ``forward`` fills with out and the log-sum-exp, or None if
            ``forward`` must allocate them.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    allocate: Callable[..., Any]


class FeedForward(NamedTuple):
    """The launchers of a feed-forward's first product with its activation, and of their gradient.

    ``kernels.feed_forward`` and ``kernels.feed_forward_backward`` document the arguments.

    Attributes:
        forward: Returns the result of the activation and, with ``save``, the pre-activation.
        backward: Returns the gradients of the pre-activation and of the bias, and the result of the
            activation again.
        allocate: Returns a tensor that ``forward`` fills with the result of the activation, or None
            if ``forward`` must allocate it.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    allocate: Callable[..., Any]


class LayerNorm(NamedTuple):
    """The launchers of layer norm, with the arguments that ``kernels.layer_norm`` documents.

    Attributes:
        forward: Returns y, mean and rstd.
        backward: Returns the gradients of residual + dropout(x + x_bias), x, weight, bias and
            x_bias.
        allocate: Returns tensors that ``forward`` fills with y, mean and rstd, or None if
            ``forward`` must allocate them.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    allocate: Callable[..., Any]


class Launchers(NamedTuple):
    """The launchers of attention, feed-forward and layer norm in a layer."""

    attention: Attention
    feed_forward: FeedForward
    layer_norm: LayerNorm


def _allocate_activation(rows: Tensor, columns: int) -> Tensor:
    return torch.empty((rows.shape[0], columns), dtype=rows.dtype, device=rows.device)


TRITON = Launchers(
    Attention(
        attention.attention_forward,
        attention_backward.attention_backward,
        attention.allocate_results,
    ),
    FeedForward(
        feed_forward.linear_gelu_forward,
        feed_forward_backward.feed_forward_backward,
        _allocate_activation,
    ),
    LayerNorm(
        layer_norm.layer_norm_forward, layer_norm.layer_norm_backward, layer_norm.allocate_results
    ),
)
