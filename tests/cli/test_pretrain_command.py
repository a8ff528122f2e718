"""``fastbert pretrain``."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest

from fastbert.cli.pretrain import parse_overrides, pretrain
from fastbert.data import stories
from fastbert.training import PretrainOptions

SMALL = (
    "--preset", "tiny", "--config", "hidden_size=16", "--config", "num_hidden_layers=1",
    "--config", "intermediate_size=32", "--vocab-size", "200", "--max-length", "24",
    "--tokens-per-batch", "96", "--steps", "3", "--log-every", "1", "--eval-batches", "2",
)  # fmt: skip


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "stories.txt"
    path.write_text("\n\n".join("\n".join(document) for document in stories(40, 0)))
    return path


def test_options_and_defaults_are_those_of_the_library():
    parameters = dict(inspect.signature(pretrain).parameters)
    assert parameters.pop("as_json").default is False
    fields = {field.name: field for field in dataclasses.fields(PretrainOptions)}
    assert parameters.keys() == fields.keys()
    for name, parameter in parameters.items():
        if name not in ("corpus", "output", "config"):
            assert parameter.default == fields[name].default, name


def test_trains_saves_and_says_so(run, corpus, tmp_path):
    result = run("pretrain", corpus, tmp_path / "out", *SMALL, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["steps"] == 3
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
    assert content["checkpoint"] == str(tmp_path / "out" / "model")
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["hidden_size"] == 16


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--preset", "huge"), "preset: got 'huge', allowed: tiny, mini, base, large"),
        (("--config", "hidden_size"), "--config: got 'hidden_size', allowed: KEY=VALUE"),
        (("--config", "hidden=3"), "config: got 'hidden', allowed: fields of BertConfig"),
        (("--steps", "0"), "steps: got 0"),
        (("--steps", "3", "--epochs", "1"), "at most one of them"),
        (("--backend", "rocm"), "backend: got 'rocm'"),
    ],
)
def test_bad_options_write_nothing(refused, corpus, tmp_path, arguments, named):
    assert named in refused("pretrain", corpus, tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_no_corpus_and_empty_corpus_write_nothing(run, tmp_path):
    (tmp_path / "empty").mkdir()
    for corpus in (tmp_path / "nowhere", tmp_path / "empty"):
        result = run("pretrain", corpus, tmp_path / "out", *SMALL)
        assert result.exit_code == 2
        assert "error: " in result.output
        assert str(corpus) in result.output
        assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_overrides_are_json_or_text():
    pairs = ["hidden_size=64", "hidden_act=gelu_new", "classifier_dropout=null"]
    values = {"hidden_size": 64, "hidden_act": "gelu_new", "classifier_dropout": None}
    assert parse_overrides(pairs) == values
