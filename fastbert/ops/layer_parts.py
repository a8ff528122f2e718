"""The backends and the launchers of attention, feed-forward and layer norm in a layer on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastbert.ops import backend as backends
from fastbert.ops.backend import Request, resolve

if TYPE_CHECKING:
    from fastbert.kernels.layer_parts import Launchers

# The operations of a layer on a GPU that can run on either backend of PART_BACKENDS.
PARTS = ("attention", "feed_forward", "layer_norm")
PART_BACKENDS = ("triton", "cuda")


class Parts(NamedTuple):
    """The backends of attention, feed-forward and layer norm: "triton" or "cuda"."""

    attention: str = "triton"
    feed_forward: str = "triton"
    layer_norm: str = "triton"


def choose_parts(
    request: Request, norm_dtype: torch.dtype, requested: Mapping[str, str | None]
) -> Parts:
    """Choose the backends of the `PARTS` of a layer on a GPU.

    Args:
        request: Properties of the call of attention in the layer, with the columns, the rows and
            the activation of the products of the layer.
        norm_dtype: Dtype of the rows that the layer norms read.
        requested: The requested backend of each operation; an operation that is missing or has the
            value None chooses its backend.

    Raises:
        ValueError: If a requested backend cannot serve its operation.
    """
    requests = (request, request, request._replace(dtype=norm_dtype))
    return Parts(
        *(
            resolve(op, requested.get(op), own).backend
            for op, own in zip(PARTS, requests, strict=True)
        )
    )


@functools.cache
def launchers(parts: Parts) -> Launchers:
    """Return functions that launch attention, feed-forward and layer norm on backends `parts`."""
    from fastbert.kernels import layer_parts

    chosen = layer_parts.TRITON
    if parts.attention == "cuda":
        chosen = chosen._replace(
            attention=layer_parts.Attention(_attention_forward, _attention_backward, _allocate_none)
        )
    if parts.feed_forward == "cuda":
        chosen = chosen._replace(
            feed_forward=layer_parts.FeedForward(
                _feed_forward_forward, _feed_forward_backward, _allocate_none
            )
        )
    if parts.layer_norm == "cuda":
        chosen = chosen._replace(
            layer_norm=layer_parts.LayerNorm(
                _layer_norm_forward, _layer_norm_backward, _allocate_none
            )
        )
    return chosen


def _allocate_none(*arguments: Any) -> None:
    return None


def _attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    bias: None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
    into: None = None,
) -> tuple[Tensor, Tensor]:
    return torch.ops.fastbert_C.flash_attention_forward(
        q, k, v, mask, cu_seqlens_q, cu_seqlens_q, seed, max_seqlen_q, max_seqlen_k, dropout_p,
        scale,
    )  # fmt: skip


def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask: Tensor | None,
    bias: None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    into: tuple[Tensor, Tensor, Tensor],
    seed: Tensor | None,
    dropout_p: float,
) -> None:
    torch.ops.fastbert_C.flash_attention_backward(
        *into, dout, q, k, v, out, lse, mask, cu_seqlens_q, cu_seqlens_q, seed, max_seqlen_q,
        max_seqlen_k, dropout_p, scale,
    )  # fmt: skip


def _feed_forward_forward(
    x: Tensor, w1: Tensor, b1: Tensor, *, activation: str, save: bool, into: None = None
) -> tuple[Tensor, Tensor]:
    return backends.TABLES["feed_forward"]["cuda"].forward(x, w1, b1, activation, save)


def _feed_forward_backward(
    dy: Tensor, w2: Tensor, h: Tensor, *, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    # The fourth argument is the bias, of which only the dtype is read. The pre-activation h, which
    # has this dtype, stands for the bias.
    return backends.TABLES["feed_forward"]["cuda"].backward(dy, w2, h, h, activation)


def _layer_norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    residual: Tensor | None,
    x_bias: Tensor | None,
    eps: float,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
    into: None = None,
) -> tuple[Tensor, ...]:
    return backends.TABLES["layer_norm"]["cuda"].forward(
        x, weight, bias, residual, x_bias, seed, dropout_p, eps
    )


def _layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    residual: Tensor | None,
    x_bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor | None, ...]:
    dsum, dx, dweight, dbias, dx_bias = backends.TABLES["layer_norm"]["cuda"].backward(
        dy, x, weight, mean, rstd, residual, x_bias, seed, True, dropout_p
    )
    return dsum, dx if dropout_p > 0.0 else None, dweight, dbias, dx_bias
