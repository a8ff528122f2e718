"""Attention and layer norm inside a layer: the launchers of Triton, which others may replace.

CUDA C++ has these two operations as well. ``fastbert.ops.layer_parts`` has its launchers in the
same form, because the extension is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fastbert.kernels import attention, attention_backward, layer_norm


class Attention(NamedTuple):
    """The launchers of attention, with the arguments of those in ``fastbert.kernels.attention``.

    Attributes:
        forward: Returns out and the log-sum-exp.
        backward: Writes the gradients of q, k and v into tensors.
        allocate: Returns results that ``forward`` fills, or None if it allocates its own.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    allocate: Callable[..., Any]


class LayerNorm(NamedTuple):
    """The launchers of layer norm, with the arguments of those in ``fastbert.kernels.layer_norm``.

    Attributes:
        forward: Returns y, mean and rstd.
        backward: Returns the gradients of the sum, x, weight, bias and x_bias.
        allocate: Returns results that ``forward`` fills, or None if it allocates its own.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    allocate: Callable[..., Any]


ATTENTION = Attention(
    attention.attention_forward, attention_backward.attention_backward, attention.allocate_results
)
LAYER_NORM = LayerNorm(
    layer_norm.layer_norm_forward, layer_norm.layer_norm_backward, layer_norm.allocate_results
)
