"""The configuration of a model whose files have a few kilobytes."""

from __future__ import annotations

from fastbert.config import BertConfig

CONFIG = BertConfig(
    vocab_size=31,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=12,
    max_position_embeddings=6,
)
