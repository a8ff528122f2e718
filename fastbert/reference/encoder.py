"""All layers of a BERT encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.reference.attention import attention_qkvpacked
from fastbert.reference.feed_forward import activate
from fastbert.reference.int8_linear import Int8Weight, int8_linear
from fastbert.reference.layer_norm import layer_norm


def encoder(
    hidden: Tensor,
    parameters: Sequence[Tensor],
    cu_seqlens: Tensor | None = None,
    max_seqlen: int = 0,
    *,
    batch: int,
    heads: int,
    projections: int = 1,
    scales: Sequence[Tensor] = (),
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-12,
    activation: str = "gelu",
    dtype: torch.dtype | None = None,
    all_states: bool = False,
) -> list[Tensor]:
    """Run hidden (T, H) through one layer for every twelve parameters (Devlin et al. 2019).

    With several projections of q, k and v, a layer has two parameters more for each further
    projection. If ``scales`` holds eight tensors for each layer, the weights are int8. See
    ``fastbert.ops.encoder``.
    """
    dtype = hidden.dtype if dtype is None else dtype
    rows = (-1,) if cu_seqlens is not None else (batch, max_seqlen)

    def product(x: Tensor, weight: Tensor, b: Tensor, scale: Sequence[Tensor]) -> Tensor:
        if not scale:
            return F.linear(x.to(dtype), weight.to(dtype), b.to(dtype))
        int8 = Int8Weight(weight, scale[0], scale[1], b.shape[0], x.shape[1])
        return int8_linear(x, int8, b).to(dtype)

    states = []
    count = 10 + 2 * projections
    for layer in range(len(parameters) // count):
        own = parameters[count * layer : count * (layer + 1)]
        wqkv, bqkv = (
            torch.cat(list(own[i : i + projections])) if projections > 1 else own[i]
            for i in (0, projections)
        )
        wo, bo, *norm1, w1, b1, w2, b2 = own[2 * projections : -2]
        norm2 = own[-2:]
        of_layer = scales[8 * layer : 8 * layer + 8]
        qkv_scale, out_scale, inner_scale, outer_scale = (of_layer[i : i + 2] for i in (0, 2, 4, 6))
        qkv = product(hidden, wqkv, bqkv, qkv_scale)
        qkv = qkv.view(*rows, 3, heads, hidden.shape[1] // heads)
        x: Any = attention_qkvpacked(qkv, cu_seqlens, max_seqlen, mask=mask, bias=bias)
        x = product(x.reshape(hidden.shape), wo, bo, out_scale)
        hidden = layer_norm(x.to(hidden.dtype), *norm1, residual=hidden, eps=eps)
        x = activate(product(hidden, w1, b1, inner_scale), activation)
        x = product(x, w2, b2, outer_scale)
        hidden = layer_norm(x.to(hidden.dtype), *norm2, residual=hidden, eps=eps)
        states.append(hidden)
    return states if all_states else states[-1:]
