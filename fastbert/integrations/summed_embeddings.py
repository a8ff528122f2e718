"""Word embeddings plus positions, without a layer norm and without a module of their own (Marian).

The encoder of such a model has the tables as direct children, and its own ``forward`` adds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fastbert.config import BertConfig
from fastbert.modules.dropout import Probabilities
from fastbert.modules.inputs import EncoderInput
from fastbert.modules.operation import OperationModule
from fastbert.ops.dropout import dropout


class SummedEmbeddings(OperationModule):
    """Embeddings ``dropout(word * factor + position)`` of tokens, of shape ``(T, H)``.

    The factor is ``sqrt(hidden_size)`` if ``config.json`` has ``scale_embedding``, and otherwise 1.
    The positions get no gradient.

    Args:
        config: Configuration of the encoder.
    """

    operation = "embedding"

    def __init__(self, config: BertConfig) -> None:
        """Create the tables."""
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        self.token_type_embeddings = None
        self.factor = math.sqrt(width) if config.extra.get("scale_embedding") else 1.0
        self.dropout_p = Probabilities.of(config).embeddings

    def forward(self, tokens: EncoderInput, dropout_seed: Tensor | None = None) -> Tensor:
        """Embed the tokens.

        Args:
            tokens: The tokens without padding. Word embeddings are not multiplied by the factor.
            dropout_seed: Seed of the dropout, int64 of shape ``(1,)``; None draws a seed.

        Returns:
            Rows of shape ``(T, H)``.
        """
        words = tokens.embeds
        if words is None:
            words = self.word_embeddings(tokens.ids) * self.factor
        rows = words + self.position_embeddings(tokens.positions).detach()
        dropout_p = self.dropout_p if self.training else 0.0
        return dropout(rows, dropout_p, dropout_seed=dropout_seed, backend=self.backend)


def embed_by_tables(hf_model: Any, given: Mapping[str, Any]) -> Tensor:
    """Call the tables of an HF model and add their outputs, as its ``forward`` does.

    Args:
        hf_model: The encoder of transformers.
        given: ``input_ids`` of shape ``(B, L)`` or ``inputs_embeds`` of shape ``(B, L, H)``, and
            ``position_ids`` or None.

    Returns:
        The embedding output of shape ``(B, L, H)``.
    """
    words = given.get("inputs_embeds")
    if words is None:
        words = hf_model.embed_tokens(given["input_ids"]) * hf_model.embed_scale
    positions = hf_model.embed_positions(words.shape[:-1], position_ids=given.get("position_ids"))
    return F.dropout(words + positions, hf_model.dropout, hf_model.training)
