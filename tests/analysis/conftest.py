"""The fixtures of a tokenizer, and of the folder with a tiny classifier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastbert.config import BertConfig
from fastbert.data import WordPieceTokenizer, stories, train_tokenizer
from fastbert.modules import BertForSequenceClassification

NAMES = ["bad", "good", "<b>other</b>"]


@pytest.fixture(scope="session")
def tokenizer() -> WordPieceTokenizer:
    return train_tokenizer(stories(30, 0), 300)


@pytest.fixture(scope="session")
def folder(tokenizer: WordPieceTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=40,
        initializer_range=0.3,
        num_labels=len(NAMES),
        extra={
            "id2label": {str(i): name for i, name in enumerate(NAMES)},
            "label2id": {name: i for i, name in enumerate(NAMES)},
        },
    )
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save(folder, max_length=40)
    return folder
