"""Options and a trained model that the seq2seq tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from seq2seq_problems import SMALL, run, write_pairs

from fastbert.seq2seq import Seq2SeqOptions


@pytest.fixture(autouse=True)
def quick_runs(quick_pictures, one_thread):
    """Compute with one thread, and draw only in tests that request the fixture `drawn`."""


@pytest.fixture
def options_of(tmp_path):
    """Return a function that makes options of a short run on reversed words."""
    pairs = write_pairs(tmp_path / "pairs.tsv", "abcd")

    def make(**changes) -> Seq2SeqOptions:
        settings = {"pairs": pairs, "output": tmp_path / "out", **SMALL, **changes}
        return Seq2SeqOptions(**settings)

    return make


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model that was trained for a few steps, so that it makes mistakes."""
    folder = tmp_path_factory.mktemp("trained")
    pairs = write_pairs(folder / "pairs.tsv", "abcd")
    settings = {**SMALL, "epochs": 15, "learning_rate": 8e-3, "eval_every": 99}
    result, _ = run(Seq2SeqOptions(pairs=pairs, output=folder / "out", **settings))
    return result.model
