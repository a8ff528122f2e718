"""A tiny corpus and options that every training test shares."""

import pytest

from fastbert.data import stories
from fastbert.training.options import PretrainOptions


@pytest.fixture(scope="session")
def documents():
    return list(stories(60, 0))


@pytest.fixture(autouse=True)
def quick_runs(quick_pictures, one_thread):
    """Compute with one thread, and draw only in tests that request the fixture `drawn`."""


@pytest.fixture
def options(tmp_path):
    def make(**changes):
        config = {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
            **changes.pop("config", {}),
        }
        settings = {
            "output": tmp_path / "out",
            "preset": "tiny",
            "vocab_size": 300,
            "max_length": 48,
            "tokens_per_batch": 384,
            "steps": 8,
            "learning_rate": 3e-3,
            "held_out": 0.2,
            "log_every": 2,
            **changes,
        }
        return PretrainOptions(config=config, **settings)

    return make
