"""One layer of the encoder."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fastbert import ops
from fastbert.config import BertConfig
from fastbert.modules.attention import BertAttention
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.dropout import NO_SEEDS, LayerSeeds
from fastbert.modules.feed_forward import BertIntermediate, BertOutput


class BertLayer(nn.Module):
    """Attention and feed-forward, each with its residual and layer norm: (T, H) → (T, H)."""

    def __init__(self, config: BertConfig, backend: str | None = None, number: int = 0) -> None:
        super().__init__()
        self.attention = BertAttention(config, backend, number)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config, backend)

    def forward(
        self,
        hidden: Tensor,
        layout: BatchLayout,
        output_attentions: bool = False,
        seeds: LayerSeeds = NO_SEEDS,
    ) -> tuple[Tensor, Tensor | None]:
        hidden, weights = self.attention(hidden, layout, output_attentions, seeds)
        return self.output(hidden, self.intermediate, seeds.output), weights


class PreNormLayer(BertLayer):
    """hidden + attention(LN(hidden)), then the same with the feed-forward (Xiong et al. 2020).

    Each block keeps the norm before it where BERT has the norm behind it; the first layer has none
    before attention, for the embeddings end in one.
    """

    def __init__(self, config: BertConfig, backend: str | None = None, number: int = 0) -> None:
        super().__init__(config, backend, number)
        self.dropout_p = self.attention.output.LayerNorm.dropout_p
        self.attention.output.LayerNorm.dropout_p = 0.0
        if number == 0:
            self.attention.output.LayerNorm = nn.Identity()

    def forward(
        self,
        hidden: Tensor,
        layout: BatchLayout,
        output_attentions: bool = False,
        seeds: LayerSeeds = NO_SEEDS,
    ) -> tuple[Tensor, Tensor | None]:
        block = self.attention
        attended, _, weights = block.self(
            block.output.LayerNorm(hidden), layout, output_attentions, seeds.attention
        )
        attended = F.dropout(block.output.dense(attended), self.dropout_p, self.training)
        hidden = hidden + attended
        return hidden + self._feed_forward(self.output.LayerNorm(hidden)), weights

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        output, first = self.output, self.intermediate.dense
        if output.called(self.intermediate):
            return output.call(hidden, self.intermediate)
        return ops.feed_forward(
            hidden,
            first.weight,
            first.bias,
            output.dense.weight,
            output.dense.bias,
            activation=output.activation,
            backend=output.backend,
        )
