"""The fixtures of a command line that runs in this process, and of the folder of a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer.main
import typer.testing

from fastbert.cli import app
from fastbert.config import BertConfig
from fastbert.data import WordPieceTokenizer, stories, train_tokenizer
from fastbert.modules import BertForMaskedLM


@pytest.fixture(autouse=True)
def quick_runs(quick_pictures):
    """Draw only in tests that request the fixture `drawn`."""


@pytest.fixture(scope="session")
def runner():
    """Return a runner of commands that reads the signatures of all commands once, not per call."""
    command = typer.main.get_command(app)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", lambda app: command)
        yield typer.testing.CliRunner()


@pytest.fixture
def run(runner):
    """Return a function that calls ``fastbert``, whose result has stdout and stderr in `output`."""

    def call(*arguments: object):
        return runner.invoke(app, [str(argument) for argument in arguments])

    return call


@pytest.fixture
def refused(run):
    """Return a function that expects exit status 2 and one line of output, and returns the line."""

    def call(*arguments: object) -> str:
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        lines = result.output.strip().splitlines()
        assert len(lines) == 1, result.output
        assert lines[0].startswith("error: ")
        return lines[0]

    return call


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer: WordPieceTokenizer = train_tokenizer(stories(30, 0), 300)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=40,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder
