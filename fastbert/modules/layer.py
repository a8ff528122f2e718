"""The layers of an encoder, with layer norms after attention and feed-forward or before them."""

from __future__ import annotations

from torch import Tensor, nn

from fastbert.config import BertConfig
from fastbert.modules.attention import BertAttention, BertSelfAttention
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.dropout import NO_SEEDS, LayerSeeds
from fastbert.modules.feed_forward import BertIntermediate, BertOutput
from fastbert.modules.relative_attention import InterleavedSelfAttention, RelativeSelfAttention
from fastbert.ops.dropout import dropout


class BertLayer(nn.Module):
    """A layer: attention and feed-forward, each with a residual connection and a layer norm.

    Args:
        config: Configuration of the model.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
        number: Number of the layer, from 0.
    """

    def __init__(self, config: BertConfig, backend: str | None = None, number: int = 0) -> None:
        """Create attention and feed-forward."""
        super().__init__()
        self.attention = BertAttention(config, backend, number, _kind(config))
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config, backend)

    def forward(
        self,
        hidden: Tensor,
        layout: BatchLayout,
        output_attentions: bool = False,
        seeds: LayerSeeds = NO_SEEDS,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer.

        Args:
            hidden: Rows of shape ``(T, H)``.
            layout: Division of the rows into sequences.
            output_attentions: Whether the attention weights are returned.
            seeds: Dropout seeds of the layer.

        Returns:
            Rows of shape ``(T, H)``; the attention weights in the caller's layout, or None if
            `output_attentions` is False.
        """
        hidden, weights = self.attention(hidden, layout, output_attentions, seeds)
        return self.output(hidden, self.intermediate, seeds), weights


def _kind(config: BertConfig) -> type[BertSelfAttention]:
    """Return the class of self-attention that a configuration needs."""
    choices = config.architecture
    if choices.relative_positions is None:
        return BertSelfAttention
    return InterleavedSelfAttention if choices.interleaved else RelativeSelfAttention


class PreNormLayer(BertLayer):
    """A layer with layer norms before attention and feed-forward (Xiong et al. 2020).

    The layer computes ``hidden = hidden + attention(LN(hidden))``, and then
    ``hidden + feed_forward(LN(hidden))``. In a state dict, the norm before a block has the name
    that BERT gives to the norm after the same block. In some architectures, the first layer has no
    norm before attention, because the embeddings end in a layer norm.

    Args:
        config: Configuration of the model.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
        number: Number of the layer, from 0.
    """

    def __init__(self, config: BertConfig, backend: str | None = None, number: int = 0) -> None:
        """Create attention and feed-forward, and move the dropouts out of the layer norms."""
        super().__init__(config, backend, number)
        norms = (self.attention.output.LayerNorm, self.output.LayerNorm)
        self.dropout_p, self.output_dropout_p = (norm.dropout_p for norm in norms)
        for norm in norms:
            norm.dropout_p = 0.0
        if number == 0 and not config.architecture.first_norm:
            self.attention.output.LayerNorm = nn.Identity()

    def forward(
        self,
        hidden: Tensor,
        layout: BatchLayout,
        output_attentions: bool = False,
        seeds: LayerSeeds = NO_SEEDS,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer; see `BertLayer.forward`."""
        block = self.attention
        attended, _, weights = block.self(
            block.output.LayerNorm(hidden), layout, output_attentions, seeds.attention
        )
        attended = block.output.dense(attended)
        hidden = hidden + self._dropout(attended, self.dropout_p, seeds.attention_output)
        normed = self.output.LayerNorm(hidden)
        fed = self.output.without_norm(normed, self.intermediate, seeds.inner)
        return hidden + self._dropout(fed, self.output_dropout_p, seeds.output), weights

    def _dropout(self, rows: Tensor, dropout_p: float, seed: Tensor | None) -> Tensor:
        dropout_p = dropout_p if self.training else 0.0
        return dropout(rows, dropout_p, dropout_seed=seed, backend=self.output.backend)
