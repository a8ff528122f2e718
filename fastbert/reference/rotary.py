"""Rotary position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, heads: int) -> Tensor:
    """Rotate the first ``heads`` heads of x (T, N, D); see ``fastbert.ops.rotary``."""
    dtype = torch.promote_types(x.dtype, cos.dtype)
    cos, sin = (part.to(dtype).unsqueeze(1) for part in (cos, sin))
    first, second = x[:, :heads].to(dtype).chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([turned.to(x.dtype), x[:, heads:]], 1)
