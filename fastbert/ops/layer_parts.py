"""Attention and layer norm inside a call of several operations: the choice and the launchers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastbert.ops import backend as backends
from fastbert.ops.backend import Request, resolve

if TYPE_CHECKING:
    from fastbert.kernels.layer_parts import Attention, LayerNorm

# The operations for which a call on a GPU takes either backend.
PARTS = ("attention", "layer_norm")
PART_BACKENDS = ("triton", "cuda")


class Parts(NamedTuple):
    """The backends of the two operations, "triton" or "cuda"."""

    attention: str = "triton"
    layer_norm: str = "triton"


def choose_parts(
    attention: Request, norm_dtype: torch.dtype, requested: Mapping[str, str | None]
) -> Parts:
    """Choose the backends of a call on Triton kernels, or of a layer.

    Args:
        attention: Properties of the attention; ``columns`` are those of the layer norm.
        norm_dtype: Dtype of the rows that the layer norm reads.
        requested: The requested backend by operation.

    Raises:
        ValueError: If a requested backend cannot serve its operation.
    """
    norm = Request(
        attention.device, norm_dtype, columns=attention.columns, trained=attention.trained
    )
    return Parts(
        resolve("attention", requested.get("attention"), attention).backend,
        resolve("layer_norm", requested.get("layer_norm"), norm).backend,
    )


@functools.cache
def launchers(parts: Parts) -> tuple[Attention, LayerNorm]:
    """Return the launchers of attention and of layer norm."""
    from fastbert.kernels import layer_parts

    attention, norm = layer_parts.ATTENTION, layer_parts.LAYER_NORM
    if parts.attention == "cuda":
        attention = layer_parts.Attention(_attention_forward, _attention_backward, _allocate_none)
    if parts.layer_norm == "cuda":
        norm = layer_parts.LayerNorm(_layer_norm_forward, _layer_norm_backward, _allocate_none)
    return attention, norm


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
