"""Word embeddings plus positions, without a layer norm (Vaswani et al. 2017, sections 3.4, 3.5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fastbert.modules.operation import OperationModule
from fastbert.ops.dropout import dropout
from fastbert.transformer_config import TransformerConfig


class TransformerEmbeddings(OperationModule):
    """Embeddings ``dropout(word * factor + position)`` of tokens, of shape ``(T, H)``.

    The factor is ``sqrt(d_model)`` with ``config.scale_embedding``, and otherwise 1. The table of
    positions is a parameter without a gradient if it has the sinusoids.

    Args:
        config: Configuration of the model.
        vocab_size: Number of tokens of the vocabulary.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
    """

    operation = "embedding"

    def __init__(
        self, config: TransformerConfig, vocab_size: int, backend: str | None = None
    ) -> None:
        """Create the tables; `reset_positions` sets the sinusoids."""
        super().__init__(backend)
        width = config.d_model
        self.word_embeddings = nn.Embedding(vocab_size, width, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        self.static = config.static_position_embeddings
        self.position_embeddings.weight.requires_grad_(not self.static)
        self.factor = math.sqrt(width) if config.scale_embedding else 1.0
        self.dropout_p = config.dropout

    @torch.no_grad()
    def reset_positions(self) -> None:
        """Set the table of positions to the sinusoids, unless the positions are learned."""
        table = self.position_embeddings.weight
        if self.static and not table.is_meta:
            table.copy_(sinusoids(*table.shape))

    def forward(self, ids: Tensor, positions: Tensor, dropout_seed: Tensor | None = None) -> Tensor:
        """Embed the tokens.

        Args:
            ids: Token ids, int64 or int32 of shape ``(T,)``.
            positions: Positions, int64 or int32 of the shape of `ids`.
            dropout_seed: Seed of the dropout, int64 of shape ``(1,)``; None draws a seed.

        Returns:
            Rows of shape ``(T, H)``.
        """
        rows = self.word_embeddings(ids) * self.factor + self.position_embeddings(positions)
        dropout_p = self.dropout_p if self.training else 0.0
        return dropout(rows, dropout_p, dropout_seed=dropout_seed, backend=self.backend)


def sinusoids(length: int, width: int) -> Tensor:
    """Return the positions of Vaswani et al. 2017, section 3.5, in the order of Marian.

    The sines are in the first half of the columns, and the cosines in the second half. Column ``k``
    of both halves has the frequency ``10000 ** (-2k / width)``.

    Args:
        length: Number of positions.
        width: Number of columns; the number of cosines is smaller by one if `width` is odd.

    Returns:
        Tensor of shape ``(length, width)`` in fp64.
    """
    sines = (width + 1) // 2
    exponents = 2.0 * torch.arange(sines, dtype=torch.float64) / width
    angles = torch.arange(length, dtype=torch.float64)[:, None] / 10000.0**exponents
    return torch.cat([angles.sin(), angles[:, : width // 2].cos()], dim=1)
