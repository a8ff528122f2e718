"""One layer of the encoder."""

from __future__ import annotations

from torch import Tensor, nn

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
