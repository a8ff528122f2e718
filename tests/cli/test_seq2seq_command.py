"""``fastbert seq2seq`` trains a model in a process of its own, and writes the targets of texts."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from itertools import product
from pathlib import Path

import _fresh_python
import pytest

from fastbert.cli.seq2seq import train
from fastbert.seq2seq import Seq2SeqOptions

SIZES = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "init_std": 0.1,
}
SMALL = [f"--config={name}={value}" for name, value in SIZES.items()]


def write_pairs(path: Path, letters: str) -> Path:
    """Write all words of three letters and the reversed words to a .jsonl file."""
    words = ["".join(word) for word in product(letters, repeat=3)]
    lines = [json.dumps({"source": word, "target": word[::-1]}) for word in words]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """Train on reversed words in another process; return its result, the folder and stderr."""
    folder = tmp_path_factory.mktemp("seq2seq")
    options = ("--merges", 0, "--epochs", 25, "--batch-size", 20, "--learning-rate", 8e-3)
    more = ("--max-length", 8, "--held-out", 0.2, "--eval-every", 60, "--json", *SMALL)
    pairs = write_pairs(folder / "pairs.jsonl", "abcde")
    arguments = ("--pairs", pairs, "-o", folder / "out", *options, *more)
    command = ("-m", "fastbert", "seq2seq", "train", *arguments)
    result = _fresh_python.run(
        *command, env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "500"}
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), folder, result.stderr


def test_a_command_learns_to_reverse_words_that_it_never_saw(trained):
    result, folder, text = trained
    assert result["model"] == str(folder / "out" / "model")
    assert result["pairs"] == {"train": 100, "validation": 25}
    assert result["figures"]["exact_match"] >= 0.95
    assert "pairs: 100 pairs to train on, 25 held out; 258 different pieces" in text
    assert "step 60, after epoch 12: held-out loss" in text
    for row in result["examples"]:
        assert row["target"] == row["source"][::-1]


def test_predict_reverses_texts_and_the_lines_of_a_file(trained, run, tmp_path):
    model = trained[0]["model"]
    words = [row["source"] for row in trained[0]["examples"]]
    result = run("seq2seq", "predict", model, *(f"--text={word}" for word in words))
    assert result.exit_code == 0, result.output
    expected = [row["output"] for row in trained[0]["examples"]]
    assert result.stdout.split() == expected
    told = run("seq2seq", "predict", model, "--text", words[0], "--num-beams", 2, "--json")
    [row] = json.loads(told.stdout)
    assert row["source"] == words[0]

    lines, said = tmp_path / "words.tsv", tmp_path / "said.jsonl"
    lines.write_text("\n".join(["word", *words]), encoding="utf-8")
    written = run("seq2seq", "predict", model, lines, said, "--field", "word")
    assert written.exit_code == 0, written.output
    assert f"5 texts → {said}" in written.stdout
    rows = map(json.loads, said.read_text(encoding="utf-8").splitlines())
    assert [row["target"] for row in rows] == expected


def test_a_finished_run_prints_its_result_again(run, tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl", "abc")
    command = ("seq2seq", "train", "--pairs", pairs, "--out", tmp_path / "out", *SMALL)
    options = ("--merges", 0, "--epochs", 1, "--held-out", 0.2)
    assert run(*command, *options).exit_code == 0
    result = run(*command, *options)
    assert result.exit_code == 0, result.output
    assert "resumed after step 1 of 1" in result.output
    assert "exact match 0.00%: 0 of 5 held-out sources, after 1 steps" in result.stdout
    for name in ("model", "metrics.json", "curves.png"):
        assert str(tmp_path / "out" / name) in result.stdout


def test_options_and_defaults_are_those_of_the_library():
    parameters = dict(inspect.signature(train).parameters)
    assert parameters.pop("as_json").default is False
    fields = {field.name: field for field in dataclasses.fields(Seq2SeqOptions)}
    assert parameters.keys() == fields.keys()
    for key, parameter in parameters.items():
        if key not in ("output", "config"):
            assert parameter.default == fields[key].default, key


@pytest.mark.parametrize("name", ["train", "predict"])
def test_help_ends_with_an_example(run, name):
    result = run("seq2seq", name, "--help")
    assert result.exit_code == 0
    assert f"Example: fastbert seq2seq {name} " in result.stdout
    assert "--json" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "translate"), "--task: got 'translate', allowed: hyphens, numbers, reverse"),
        (("--batch-size", 0), "--batch-size: got 0, allowed: an integer >= 1"),
        (("--held-out", 1), "--held-out: got 1.0, allowed: a number in (0, 1)"),
        (("--pairs", "nowhere.tsv"), "--pairs: nowhere.tsv does not exist, allowed: a file"),
        (("--config", "d_model"), "--config: got 'd_model', allowed: KEY=VALUE"),
        (("--config", "d_model=30"), "d_model: got 30, allowed: a multiple of encoder_attention"),
        (("--corpus", "x"), "--corpus: got 'x', allowed: None, because numbers needs no text"),
    ],
)
def test_a_mistake_in_training_is_one_line(refused, tmp_path, arguments, message):
    told = refused("seq2seq", "train", "-o", tmp_path / "out", *arguments)
    assert told.startswith(f"error: {message}")
    assert not (tmp_path / "out").exists()


def test_a_mistake_in_a_prediction_is_one_line(refused, trained, tmp_path):
    model, lines = trained[0]["model"], tmp_path / "words.txt"
    lines.write_text("abc\n" + "a" * 9, encoding="utf-8")
    command = ("seq2seq", "predict", model)
    assert "INPUT: got none, allowed: INPUT and OUT, or --text" in refused(*command)
    assert "OUT: got none, allowed: INPUT and OUT, or --text" in refused(*command, lines)
    assert "--text: got a text and INPUT" in refused(*command, lines, "--text", "a")
    message = refused(*command, lines, tmp_path / "out.txt")
    assert "OUT: got " in message
    assert "allowed: a name in .jsonl" in message
    assert "--backend: got 'rocm'" in refused(*command, "--text", "a", "--backend", "rocm")
    assert "--num-beams: got 0, allowed" in refused(*command, "--text", "a", "--num-beams", 0)
    assert "text 1 has 9 pieces, allowed: at most 8" in refused(*command, "--text", "a" * 9)
    message = refused("seq2seq", "predict", tmp_path / "nowhere", "--text", "a")
    assert "nowhere" in message
