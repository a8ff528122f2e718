"""The stack of layers. Everything here works on rows (T, H); nothing is padded or unpadded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastbert.config import BertConfig
from fastbert.modules.attention import BertAttention
from fastbert.modules.dropout import NO_SEEDS, LayerSeeds
from fastbert.modules.feed_forward import BertIntermediate, BertOutput
from fastbert.modules.layout import Layout


class BertLayer(nn.Module):
    """Attention and feed-forward, each with its residual and layer norm: (T, H) → (T, H)."""

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        super().__init__()
        self.attention = BertAttention(config, backend)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config, backend)

    def forward(
        self,
        hidden: Tensor,
        layout: Layout,
        output_attentions: bool = False,
        seeds: LayerSeeds = NO_SEEDS,
    ) -> tuple[Tensor, Tensor | None]:
        hidden, weights = self.attention(hidden, layout, output_attentions, seeds)
        return self.output(hidden, self.intermediate, seeds.output), weights


class BertEncoder(nn.Module):
    """All layers. With ``gradient_checkpointing`` a training step keeps one (T, H) per layer and
    computes the rest again in the backward pass, with the same dropout masks."""

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            BertLayer(config, backend) for _ in range(config.num_hidden_layers)
        )
        self.gradient_checkpointing = False

    def forward(
        self,
        hidden: Tensor,
        layout: Layout,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        seeds: Sequence[LayerSeeds] | None = None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The rows that leave the last layer; on request, else empty, the rows that enter the first
        layer and leave each one (N + 1), and the attention weights of each (N). ``seeds``: one
        entry per layer."""
        states, attentions = [hidden] if output_hidden_states else [], []
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        for i, layer in enumerate(self.layer):
            arguments = (hidden, layout, output_attentions, NO_SEEDS if seeds is None else seeds[i])
            if recompute:
                hidden, weights = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                hidden, weights = layer(*arguments)
            if output_hidden_states:
                states.append(hidden)
            if weights is not None:
                attentions.append(weights)
        return hidden, states, attentions
