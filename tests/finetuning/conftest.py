"""A tiny pre-trained model and options that every fine-tuning test shares."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from finetuning_problems import NAMES, OTHERS, PLACES

from fastbert.config import BertConfig
from fastbert.data import WordPieceTokenizer, stories, train_tokenizer
from fastbert.finetuning import AnswerOptions, ClassifyOptions, TagOptions
from fastbert.modules import BertForPreTraining


@pytest.fixture(autouse=True)
def quick_runs(quick_pictures, one_thread):
    """Compute with one thread, and draw only in tests that request the fixture `drawn`."""


@pytest.fixture(scope="session")
def tokenizer() -> WordPieceTokenizer:
    # Without the additional texts, the tokenizer would cut most of the tests' words into pieces.
    documents = [*stories(30, 0), *([" ".join((*NAMES, *PLACES, *OTHERS))] for _ in range(20))]
    return train_tokenizer(documents, 260)


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """Return the folder of a small model with random weights, as pre-training writes it."""
    folder = tmp_path_factory.mktemp("pretrained")
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=48,
        initializer_range=0.2,
        hidden_dropout_prob=0.05,
        attention_probs_dropout_prob=0.05,
    )
    torch.manual_seed(0)
    BertForPreTraining(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture
def options_of(pretrained, tmp_path):
    """Return a function that makes options of a class for a short run on ``data``."""

    def make(kind, data: Path, **changes):
        settings = {
            "model": pretrained,
            "output": tmp_path / "out",
            "epochs": 3,
            "batch_size": 8,
            "learning_rate": 3e-3,
            **changes,
        }
        return kind(data=data, **settings)

    return make


@pytest.fixture
def classify(options_of):
    return partial(options_of, ClassifyOptions)


@pytest.fixture
def tag(options_of):
    return partial(options_of, TagOptions)


@pytest.fixture
def answer(options_of):
    return partial(options_of, AnswerOptions)
