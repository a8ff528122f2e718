"""Texts and small models for the tests of the viewer."""

from __future__ import annotations

import torch

import fastbert

TEXTS = ("The old mill stood [MASK] the river.", "A boy found a lantern.")


def tiny_masked_lm(size: int) -> fastbert.BertForMaskedLM:
    """Return a BERT with random weights that are large enough for uneven attention."""
    torch.manual_seed(0)
    config = fastbert.BertConfig(
        vocab_size=size,
        hidden_size=36,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.25,
    )
    return fastbert.BertForMaskedLM(config).eval()
