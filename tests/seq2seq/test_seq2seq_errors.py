"""A mistake in the data or the options is an error before any file is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from seq2seq_problems import SIZES, run, write_pairs

from fastbert.seq2seq import Seq2SeqOptions


@pytest.fixture
def refused(tmp_path):
    """Return a function that expects an error and no output folder, and returns the message."""

    def call(**changes) -> str:
        output = tmp_path / "out"
        with pytest.raises((ValueError, FileNotFoundError)) as failure:
            run(Seq2SeqOptions(**{"output": output, **changes}))
        assert not Path(output).exists()
        return str(failure.value)

    return call


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "translate"}, "task: got 'translate', allowed: hyphens, numbers, reverse"),
        ({"corpus": "text"}, "corpus: got 'text', allowed: None, because numbers needs no text"),
        ({"epochs": 0}, "epochs: got 0, allowed: an integer >= 1"),
        ({"merges": -1}, "merges: got -1, allowed: an integer in [0, 1048576]"),
        ({"seed": True}, "seed: got True, allowed: an integer in [0, "),
        ({"eval_every": 0}, "eval_every: got 0, allowed: None or an integer >= 1"),
        ({"held_out": 0}, "held_out: got 0, allowed: a number in (0, 1)"),
        ({"learning_rate": float("nan")}, "learning_rate: got nan, allowed: a finite number > 0"),
        ({"warmup": 1.0}, "warmup: got 1.0, allowed: a number in [0, 1)"),
        ({"weight_decay": -1}, "weight_decay: got -1, allowed: a finite number >= 0"),
        ({"save_minutes": 0}, "save_minutes: got 0, allowed: None or a finite number > 0"),
        ({"precision": "fp16"}, "precision: got 'fp16', allowed: fp32, bf16"),
        ({"backend": "rocm"}, "backend: got 'rocm'"),
        ({"config": {"width": 8}}, "config: got 'width', allowed: fields of TransformerConfig: "),
        ({"config": {"vocab_size": 8}}, "config: got 'vocab_size', allowed: fields of Transf"),
        ({"config": {"d_model": 30}}, "d_model: got 30, allowed: a multiple of encoder_attention"),
    ],
)
def test_an_option_that_is_not_allowed_is_named(refused, changes, message):
    assert refused(**changes).startswith(message)


def test_a_task_and_pairs_are_not_both_allowed(refused, tmp_path):
    pairs = write_pairs(tmp_path / "pairs.tsv", "ab")
    message = refused(task="numbers", pairs=pairs)
    assert message == (f"task and pairs: got ('numbers', '{pairs}'), allowed: at most one of them")
    message = refused(corpus="text", pairs=pairs)
    assert message == "corpus: got 'text', allowed: None, because pairs needs no text"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("pairs.txt", "a b\n", "pairs: got '{path}', allowed: a .csv, .tsv, .jsonl, .parquet file"),
        ("pairs.tsv", "source\ttext\na\tb\n", "{path}, line 1: no column 'target', allowed: sou"),
        ("pairs.tsv", "source\ttarget\na\n", "{path}, line 2: got 1 fields, allowed: 2"),
        ("pairs.tsv", "source\ttarget\na\t\n", "{path}, line 2: got '' in target, allowed: a te"),
        ("pairs.tsv", "source\ttarget\n", "{path}: the file has no rows, allowed: at least one"),
        ("pairs.jsonl", '{"source": "a", "target": 1}', "{path}, line 1: got 1 in target, all"),
        ("pairs.jsonl", '{"source": "a"}', "{path}, line 1: no field 'target'; the fields are: so"),
        ("pairs.tsv", "source\ttarget\na\tb\n", "held_out: got 0.02 of 1 examples or contexts"),
    ],
)
def test_a_file_that_is_not_usable_is_named_with_its_line(
    refused, tmp_path, name, content, message
):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    assert refused(pairs=path).startswith(message.format(path=path))


def test_a_file_that_does_not_exist_is_named(refused, tmp_path):
    path = tmp_path / "nowhere.tsv"
    assert refused(pairs=path) == f"pairs: {path} does not exist, allowed: a file"
    message = refused(task="reverse", corpus=path)
    assert message == f"corpus: {path} does not exist, allowed: a file or folder"


def test_a_corpus_without_a_word_to_divide_is_named(refused, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a b c.\n\nd e f.\n", encoding="utf-8")
    message = refused(task="hyphens", corpus=corpus)
    assert message == f"corpus: {corpus} has no word that can be divided, allowed: prose"


def test_python_without_the_text_of_help_is_named(monkeypatch, options_of, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    options = Seq2SeqOptions(output=tmp_path / "out", task="hyphens")
    with pytest.raises(ImportError, match=r"^corpus: got None, but this Python was installed with"):
        run(options)
    assert not options.folder.exists()


def test_pairs_that_are_all_too_long_are_an_error(refused, tmp_path):
    pairs = write_pairs(tmp_path / "pairs.tsv", "abcd")
    message = refused(pairs=pairs, max_length=2, merges=0, config=SIZES)
    assert re.match(r"max_length: got 2, but all 63 pairs of the part train have more pie", message)


def test_a_folder_with_another_model_is_kept(options_of, tmp_path):
    model = tmp_path / "out" / "model"
    model.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"^output: .* holds a model already, and no checkpoint"):
        run(options_of())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]
