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
from fastbert.reference.relative_attention import relative_attention
from fastbert.reference.rms_norm import rms_norm as rms
from fastbert.reference.rotary import rotary


def encoder(
    hidden: Tensor,
    parameters: Sequence[Tensor],
    cu_seqlens: Tensor | None = None,
    max_seqlen: int = 0,
    *,
    batch: int,
    heads: int,
    key_value_heads: int | None = None,
    projections: int = 1,
    scales: Sequence[Tensor] = (),
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    rotations: Sequence[Tensor] = (),
    windows: Sequence[int] = (),
    positions: Sequence[Tensor] = (),
    scale: float | None = None,
    inner_projections: int = 1,
    pre_norm: bool = False,
    rms_norm: bool = False,
    eps: float = 1e-12,
    activation: str = "gelu",
    dtype: torch.dtype | None = None,
    all_states: bool = False,
) -> list[Tensor]:
    """Run hidden (T, H) through all layers (Devlin et al. 2019).

    See ``fastbert.ops.encoder``, which also gives the order of the parameters of a layer.
    """
    dtype = hidden.dtype if dtype is None else dtype
    rows = (-1,) if cu_seqlens is not None else (batch, max_seqlen)

    def product(x: Tensor, of_layer: tuple[Any, Any], of_int8: Sequence[Tensor]) -> Tensor:
        weight, b = of_layer
        if not of_int8:
            b = None if b is None else b.to(dtype)
            return F.linear(x.to(dtype), weight.to(dtype), b)
        int8 = Int8Weight(weight, of_int8[0], of_int8[1], b.shape[0], x.shape[1])
        return int8_linear(x, int8, b).to(dtype)

    def joined(own: list[Tensor], first: int, count: int) -> Tensor | None:
        given = [t for t in own[first : first + count] if t.numel() > 0]
        return torch.cat(given) if count > 1 and given else next(iter(given), None)

    def relative(qkv: Tensor, index: Tensor, *tables: Tensor) -> Tensor:
        q, k, v = (x if cu_seqlens is not None else x.transpose(1, 2) for x in qkv.unbind(-3))
        keys, queries = (
            None if t.numel() == 0 else t.unflatten(-1, (heads, -1)).to(dtype) for t in tables
        )
        x: Any = relative_attention(
            q, k, v, index, position_keys=keys, position_queries=queries, mask=mask,
            cu_seqlens_q=cu_seqlens, max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, scale=scale,
        )  # fmt: skip
        return x if cu_seqlens is not None else x.transpose(1, 2)

    def normed(x: Tensor, norm: Any, residual: Tensor | None = None) -> Tensor:
        if rms_norm:
            return rms(x, norm[0], residual=residual, eps=eps)
        return layer_norm(x, *norm, residual=residual, eps=eps)

    stored = heads if key_value_heads is None else key_value_heads
    states = []
    count = 8 + 2 * (projections + inner_projections)
    for layer in range(len(parameters) // count):
        own = list(parameters[count * layer : count * (layer + 1)])
        # The numbers of weights of the parts of a layer, in the order of `parameters`: q, k and v;
        # the projection after attention and its norm; both products of the feed-forward; last norm.
        sizes = (projections, 1, 1, inner_projections, 1, 1)
        places = [2 * sum(sizes[:i]) for i in range(len(sizes))]
        pairs: list[Any] = [
            (joined(own, at, size), joined(own, at + size, size))
            for at, size in zip(places, sizes, strict=True)
        ]
        qkv_pair, attention_pair, norm1, inner_pair, outer_pair, norm2 = pairs
        of_layer = scales[8 * layer : 8 * layer + 8]
        qkv_scale, out_scale, inner_scale, outer_scale = (of_layer[i : i + 2] for i in (0, 2, 4, 6))
        x: Any = normed(hidden, norm1) if pre_norm and norm1[0] is not None else hidden
        qkv = product(x, qkv_pair, qkv_scale).unflatten(1, (heads + 2 * stored, -1))
        if rotations:
            angles = rotations[2 * layer : 2 * layer + 2]
            qkv = rotary(qkv, *angles, heads=heads + stored)
        q, kv = qkv.split((heads, 2 * stored), 1)
        qkv = torch.cat((q, kv.repeat_interleave(heads // stored, 1)), 1)
        qkv = qkv.view(*rows, 3, heads, q.shape[-1])
        window = windows[layer] if windows and windows[layer] >= 0 else None
        if positions:
            x = relative(qkv, *positions[3 * layer : 3 * layer + 3])
        else:
            x = attention_qkvpacked(
                qkv, cu_seqlens, max_seqlen, mask=mask, bias=bias, window=window, scale=scale
            )
        x = product(x.reshape(len(hidden), -1), attention_pair, out_scale).to(hidden.dtype)
        if pre_norm:
            hidden = hidden + x
            x = normed(hidden, norm2)
        else:
            x = hidden = normed(x, norm1, hidden)
        x = activate(product(x, inner_pair, inner_scale), activation)
        x = product(x, outer_pair, outer_scale).to(hidden.dtype)
        hidden = hidden + x if pre_norm else normed(x, norm2, hidden)
        states.append(hidden)
    return states if all_states else states[-1:]
