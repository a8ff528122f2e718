"""Word embeddings plus positions, without a layer norm (Vaswani et al. 2017, sections 3.4, 3.5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fastbert.config import BertConfig
from fastbert.modules.dropout import Probabilities
from fastbert.modules.inputs import EncoderInput
from fastbert.modules.operation import OperationModule
from fastbert.ops.dropout import dropout


class SummedEmbeddings(OperationModule):
    """Embeddings ``dropout(word * factor + position)`` of tokens, of shape ``(T, H)``.

    Args:
        config: Configuration of a stack of layers and of its input.
        scaled: Whether the factor is ``sqrt(hidden_size)``; otherwise it is 1.
        static: Whether the table of positions has the sinusoids. It is then a parameter without a
            gradient.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
    """

    operation = "embedding"

    def __init__(
        self, config: BertConfig, *, scaled: bool, static: bool, backend: str | None = None
    ) -> None:
        """Create the tables; `reset_positions` sets the sinusoids."""
        super().__init__(backend)
        width, padding_idx = config.hidden_size, config.pad_token_id
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=padding_idx)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        self.token_type_embeddings = None
        self.static = static
        self.position_embeddings.weight.requires_grad_(not static)
        self.factor = math.sqrt(width) if scaled else 1.0
        self.dropout_p = Probabilities.of(config).embeddings

    @torch.no_grad()
    def reset_positions(self) -> None:
        """Set the table of positions to the sinusoids, unless the positions are learned."""
        table = self.position_embeddings.weight
        if self.static and not table.is_meta:
            table.copy_(sinusoids(*table.shape))

    def forward(self, tokens: EncoderInput, dropout_seed: Tensor | None = None) -> Tensor:
        """Embed the tokens of a batch.

        Args:
            tokens: The tokens without padding. Word embeddings are not multiplied by the factor.
            dropout_seed: Seed of the dropout, int64 of shape ``(1,)``; None draws a seed.

        Returns:
            Rows of shape ``(T, H)``.
        """
        words = self.words(tokens.ids) if tokens.embeds is None else tokens.embeds
        return self.placed(words, tokens.positions, dropout_seed)

    def words(self, ids: Tensor) -> Tensor:
        """Return the word embeddings of ids ``(T,)`` times the factor, of shape ``(T, H)``."""
        return self.word_embeddings(ids) * self.factor

    def placed(
        self, words: Tensor, positions: Tensor, dropout_seed: Tensor | None = None
    ) -> Tensor:
        """Add the positions ``(T,)`` to word embeddings ``(T, H)``, and apply dropout."""
        added = self.position_embeddings(positions)
        rows = words + (added.detach() if self.static else added)
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
