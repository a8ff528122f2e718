"""``fastbert prepare`` writes a corpus that ``fastbert pretrain`` can use."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest

from fastbert.cli.prepare import prepare
from fastbert.data import stories
from fastbert.jobs.prepare import PrepareOptions


@pytest.fixture
def text(tmp_path):
    home = tmp_path / "text"
    home.mkdir()
    (home / "a.txt").write_text("\n\n".join("\n".join(document) for document in stories(40, 0)))
    return home


def test_options_and_defaults_are_those_of_the_library():
    parameters = dict(inspect.signature(prepare).parameters)
    assert parameters.pop("as_json").default is False
    fields = {field.name: field for field in dataclasses.fields(PrepareOptions)}
    assert parameters.keys() == fields.keys()
    for name, parameter in parameters.items():
        if name not in ("text", "output"):
            assert parameter.default == fields[name].default, name


def test_prepares_and_says_so_and_pretrain_takes_the_folder(run, text, tmp_path):
    corpus = tmp_path / "corpus"
    (text / "notes.md").write_text("Not read.")
    result = run("prepare", text, corpus, "--vocab-size", 200, "--workers", 1)
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    assert "note: 1 files of" in output
    assert "documents 40" in output
    assert "pieces of the vocabulary 200" in output
    again = run("prepare", text, corpus, "--vocab-size", 200, "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout) == json.loads(
        (corpus / "summary.json").read_text(encoding="utf-8")
    )
    small = (
        "--preset", "tiny", "--config", "hidden_size=16", "--config", "num_hidden_layers=1",
        "--max-length", "24", "--tokens-per-batch", "96", "--steps", "2", "--eval-batches", "2",
        "--objective", "sop", "--whole-word", "--json",
    )  # fmt: skip
    trained = run("pretrain", corpus, tmp_path / "out", *small)
    assert trained.exit_code == 0, trained.output
    assert json.loads(trained.stdout)["steps"] == 2
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["vocab_size"] == 200


def test_a_broken_file_is_one_line_of_error(refused, text, tmp_path):
    (text / "b.jsonl").write_text('{"text": "It rains."}\n{"text": 1}\n')
    line = refused("prepare", text, tmp_path / "corpus", "--vocab-size", 200, "--workers", 1)
    assert f"{text / 'b.jsonl'}, line 2: got" in line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--vocab-size", "3"), "--vocab-size: got 3, allowed: an integer >= 64"),
        (("--workers", "0"), "workers: got 0, allowed"),
        (("--tokenizer", "nowhere"), "tokenizer: nowhere holds neither tokenizer.json nor vocab"),
    ],
)
def test_bad_options_write_nothing(refused, text, tmp_path, arguments, named):
    assert named in refused("prepare", text, tmp_path / "corpus", *arguments)
    assert not (tmp_path / "corpus").exists()


def test_an_unfinished_corpus_is_not_trained_on(refused, text, tmp_path, monkeypatch):
    (text / "b.jsonl").write_text("{")
    corpus = tmp_path / "corpus"
    refused("prepare", text, corpus, "--vocab-size", 200, "--workers", 1)
    assert "is not finished" in refused("pretrain", corpus, tmp_path / "out")
