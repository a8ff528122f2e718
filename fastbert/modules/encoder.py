"""The stack of layers. Everything here works on rows (T, H); nothing is padded or unpadded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastbert import ops
from fastbert.config import BertConfig
from fastbert.modules.dropout import NO_SEEDS, LayerSeeds
from fastbert.modules.layer import BertLayer
from fastbert.modules.layout import Layout
from fastbert.modules.stack import Stack, stack
from fastbert.ops.backend import Choice


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
        if not output_attentions:
            plan = stack(self.layer, hidden.device.type, hidden.dtype, hidden.requires_grad)
            if isinstance(plan, Stack):
                outputs = _one_call(plan, hidden, layout, output_hidden_states)
                return outputs[-1], [*states, *outputs] if output_hidden_states else [], []
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

    def choice(self, device: str, dtype: torch.dtype, layers: str) -> Choice:
        """Who serves the layers in inference without attention weights, for rows of ``dtype``:
        the CPU's one call, or ``layers``, which serves them one by one; and why."""
        with torch.no_grad():
            plan = stack(self.layer, device, dtype, wants_gradient=False)
        if isinstance(plan, Stack):
            return Choice("cpu", "all layers in one call")
        return Choice(plan.backend or layers, plan.reason)


def _one_call(plan: Stack, hidden: Tensor, layout: Layout, all_states: bool) -> list[Tensor]:
    uniform = layout.cu_seqlens is None
    return ops.encoder(
        hidden,
        plan.parameters,
        layout.cu_seqlens,
        layout.length if uniform else layout.max_seqlen,
        batch=layout.batch,
        heads=plan.heads,
        mask=layout.mask,
        bias=layout.bias,
        eps=plan.eps,
        activation=plan.activation,
        dtype=plan.dtype,
        all_states=all_states,
    )
