"""The parameters of a layer of XLNet, with the names and shapes of transformers' modules.

The modules have no forward. ``fastbert.modules.xlnet.streams`` computes with their parameters, and
it takes the modules of transformers as well, because the names are the same.
"""

from __future__ import annotations

import torch
from torch import nn

from fastbert.xlnet_config import XLNetConfig


class XLNetRelativeAttention(nn.Module):
    """The projections and biases of attention, the layer norm after it, and the dropout.

    With the width H and n heads of size D, ``q``, ``k``, ``v``, ``r`` and ``o`` have the shape
    ``(H, n, D)``: q, k and v project the content, r projects the positions, and o projects the
    result back to H. The biases ``r_w_bias``, ``r_r_bias`` and ``r_s_bias`` of the queries for
    content, positions and segments have the shape ``(n, D)``, and ``seg_embed`` has ``(2, n, D)``.

    Args:
        config: Configuration of the model.
    """

    def __init__(self, config: XLNetConfig) -> None:
        """Create the parameters."""
        super().__init__()
        size, heads, head_dim = config.d_model, config.n_head, config.head_dim
        for name in ("q", "k", "v", "o", "r"):
            setattr(self, name, nn.Parameter(torch.empty(size, heads, head_dim)))
        for name in ("r_r_bias", "r_s_bias", "r_w_bias"):
            setattr(self, name, nn.Parameter(torch.empty(heads, head_dim)))
        self.seg_embed = nn.Parameter(torch.empty(2, heads, head_dim))
        self.layer_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)


class XLNetFeedForward(nn.Module):
    """The two projections of the feed-forward, the layer norm after it, and the dropout.

    Args:
        config: Configuration of the model.
    """

    def __init__(self, config: XLNetConfig) -> None:
        """Create the parameters."""
        super().__init__()
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.layer_1 = nn.Linear(config.d_model, config.d_inner)
        self.layer_2 = nn.Linear(config.d_inner, config.d_model)
        self.dropout = nn.Dropout(config.dropout)


class XLNetLayer(nn.Module):
    """The attention ``rel_attn`` and the feed-forward ``ff`` of a layer.

    Args:
        config: Configuration of the model.
    """

    def __init__(self, config: XLNetConfig) -> None:
        """Create both parts."""
        super().__init__()
        self.rel_attn = XLNetRelativeAttention(config)
        self.ff = XLNetFeedForward(config)
