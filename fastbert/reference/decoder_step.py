"""All layers of a decoder for one new token of each hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.reference.attention import attention
from fastbert.reference.feed_forward import activate
from fastbert.reference.layer_norm import layer_norm

# The number of parameters of a layer.
PARAMETERS = 18


def decoder_step(
    hidden: Tensor,
    parameters: Sequence[Tensor],
    cache: Tensor,
    slots: Tensor,
    position: int,
    source_cache: Tensor,
    cu_seqlens: Tensor,
    sources: Tensor,
    *,
    heads: int,
    pre_norm: bool = False,
    eps: float = 1e-5,
    activation: str = "relu",
) -> Tensor:
    """Run hidden (R, H) through all layers, and store its keys and values in `cache`.

    See ``fastbert.ops.decoder_step``.
    """
    layers = [parameters[i : i + PARAMETERS] for i in range(0, len(parameters), PARAMETERS)]
    rows, width = hidden.shape
    own_slots = slots[:rows, :position].long()
    ends = cu_seqlens.tolist()

    def product(x: Tensor, pair: Sequence[Tensor]) -> Tensor:
        weight, bias = pair
        return F.linear(x, weight, bias if bias.numel() else None)

    def in_heads(x: Tensor) -> Tensor:
        return x.view(rows, heads, 1, width // heads)

    def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = attention(q, keys, values)
        assert isinstance(out, Tensor)
        return out

    def to_own(x: Tensor, number: int, qkv: Sequence[Tensor]) -> Tensor:
        q, k, v = product(x, qkv).chunk(3, dim=1)
        for part, new in enumerate((k, v)):
            cache[number, part, :rows, :, position] = new.view(rows, heads, -1)
        order = torch.arange(position, device=hidden.device)
        kept = cache[number].permute(0, 1, 3, 2, 4)[:, own_slots, order]  # (2, R, position, ...)
        new = torch.stack([k, v]).view(2, rows, 1, heads, -1)
        keys, values = torch.cat([kept, new], dim=2).transpose(2, 3)
        return attend(in_heads(q), keys, values).reshape(rows, width)

    def to_source(x: Tensor, number: int, query: Sequence[Tensor]) -> Tensor:
        q = in_heads(product(x, query))
        out = torch.empty_like(q)
        for row, i in enumerate(sources.tolist()):
            keys, values = source_cache[number, :, None, :, ends[i] : ends[i + 1]]
            out[row] = attend(q[row : row + 1], keys, values)[0]
        return out.reshape(rows, width)

    def added(x: Tensor, norm: Sequence[Tensor], block: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``LN(x + block(x))``, or ``x + block(LN(x))`` with `pre_norm`."""
        if pre_norm:
            return x + block(layer_norm(x, norm[0], norm[1], eps=eps))
        return layer_norm(x + block(x), norm[0], norm[1], eps=eps)

    for number, p in enumerate(layers):

        def own(x: Tensor, number: int = number, p: Sequence[Tensor] = p) -> Tensor:
            return product(to_own(x, number, p[0:2]), p[2:4])

        def source(x: Tensor, number: int = number, p: Sequence[Tensor] = p) -> Tensor:
            return product(to_source(x, number, p[6:8]), p[8:10])

        def fed(x: Tensor, p: Sequence[Tensor] = p) -> Tensor:
            return product(activate(product(x, p[12:14]), activation), p[14:16])

        hidden = added(hidden, p[4:6], own)
        hidden = added(hidden, p[10:12], source)
        hidden = added(hidden, p[16:18], fed)
    return hidden
