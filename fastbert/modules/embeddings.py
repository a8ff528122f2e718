"""Word, position and token type embeddings, summed and normalised."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fastbert import ops
from fastbert.config import BertConfig
from fastbert.modules.backend import OperationModule
from fastbert.modules.inputs import Rows
from fastbert.modules.layer_norm import LayerNorm


class BertEmbeddings(OperationModule):
    """Rows of tokens → (T, H): dropout(LN(word + token type + position)) (Devlin et al. 2019,
    figure 2)."""

    operation = "embedding"

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        super().__init__(backend)
        size = config.hidden_size
        self.word_embeddings = nn.Embedding(
            config.vocab_size, size, padding_idx=config.pad_token_id
        )
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size)
        self.LayerNorm = LayerNorm(size, config.layer_norm_eps, backend=backend)
        self.dropout_p = config.hidden_dropout_prob

    def forward(self, tokens: Rows, dropout_seed: Tensor | None = None) -> Tensor:
        dropout_p = self.dropout_p if self.training else 0.0
        if tokens.ids is None:
            total = tokens.embeds + self.token_type_embeddings(tokens.token_types)
            total = total + self.position_embeddings(tokens.positions)
            return F.dropout(self.LayerNorm(total), dropout_p)
        return ops.embedding(
            tokens.ids,
            tokens.token_types,
            tokens.positions,
            self.word_embeddings.weight,
            self.token_type_embeddings.weight,
            self.position_embeddings.weight,
            self.LayerNorm.weight,
            self.LayerNorm.bias,
            eps=self.LayerNorm.eps,
            dropout_p=dropout_p,
            padding_idx=self.word_embeddings.padding_idx,
            backend=self.backend,
            dropout_seed=dropout_seed,
        )
