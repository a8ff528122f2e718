"""The stack of the decoder's layers, on rows ``(T, H)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastbert.config import BertConfig
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.transformer.decoder_layer import (
    Attention,
    DecoderLayer,
    PreNormDecoderLayer,
)


class Decoded(NamedTuple):
    """The result of the decoder.

    Attributes:
        rows: Rows after the last layer, of shape ``(T, H)``.
        attentions: The weights of self-attention of each layer; empty if not asked for.
        cross_attentions: The weights of cross-attention of each layer; empty if not asked for.
    """

    rows: Tensor
    attentions: tuple[Tensor, ...] = ()
    cross_attentions: tuple[Tensor, ...] = ()


class TransformerDecoder(nn.Module):
    """The layers of the decoder, and the norm after them if the layers have their norms first.

    Args:
        config: Configuration of the decoder's layers.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.

    Attributes:
        gradient_checkpointing: Whether activations are computed again in the backward pass.
    """

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        """Create the layers."""
        super().__init__()
        pre_norm = config.architecture.pre_norm
        kind = PreNormDecoderLayer if pre_norm else DecoderLayer
        self.layer = nn.ModuleList(
            kind(config, backend, number) for number in range(config.num_hidden_layers)
        )
        self.final_norm = (
            LayerNorm(config.hidden_size, config.layer_norm_eps, backend=backend)
            if pre_norm
            else None
        )
        self.gradient_checkpointing = False

    def forward(
        self,
        rows: Tensor,
        attention: Attention,
        after: Callable[[Tensor], Tensor] = lambda rows: rows,
    ) -> Decoded:
        """Run the layers.

        Args:
            rows: Embedded tokens of shape ``(T, H)``.
            attention: The keys and values of the call.
            after: Function that takes the rows before the first layer, and the rows after each
                layer. The function returns the input of the next layer.

        Returns:
            The rows after the last layer, and the attention weights that `attention` returns.
        """
        own, cross = [], []
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        rows = after(rows)
        for layer in self.layer:
            results: tuple[Any, ...] = (
                checkpoint(layer, rows, attention, use_reentrant=False)
                if recompute
                else layer(rows, attention)
            )
            rows = results[0]
            if self.final_norm is not None and layer is self.layer[-1]:
                rows = self.final_norm(rows)
            rows = after(rows)
            if results[1] is not None:
                own.append(results[1])
                cross.append(results[2])
        return Decoded(rows, tuple(own), tuple(cross))
