"""The same ``fastbert encode`` command resumes a stopped run; other commands start again."""

from __future__ import annotations

import importlib
import json
import shutil
import signal
from pathlib import Path

import _fresh_python
import numpy as np
import pytest
import torch

from fastbert.data import stories
from fastbert.inference.after_encoder import AfterEncoder
from fastbert.jobs import encode as job
from fastbert.jobs.partial_output import PartialOutput
from fastbert.jobs.texts import Row
from fastbert.modules import BertForMaskedLM

# The attribute ``encode`` of fastbert.cli is the command, so the module is imported by its name.
encode_module = importlib.import_module("fastbert.cli.encode")
# A job reads 8 batches at a time. With this option, the test's file needs about 10 such reads.
OPTIONS = ("--tokens-per-batch", 16)
KILLED = """
import os
from fastbert.inference.after_encoder import AfterEncoder
calls, pool = [], AfterEncoder.forward
def killed(*arguments):
    calls.append(1)
    if len(calls) == 30:
        os.kill(os.getpid(), 9)
    return pool(*arguments)
AfterEncoder.forward = killed
from fastbert.cli import main
main()
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("input") / "texts.txt"
    sentences = [sentence for document in stories(15, 0) for sentence in document][:100]
    path.write_text("\n".join(sentences) + "\n")
    return path


@pytest.fixture
def encode(run, model_folder, source):
    """Return a function that runs ``fastbert encode`` into a file."""

    def call(target: Path, *more: object, model: Path = model_folder, texts: Path = source):
        return run("encode", model, texts, target, *OPTIONS, *more)

    return call


@pytest.fixture
def stop(monkeypatch):
    """Return a function that makes a chosen batch fail until ``monkeypatch.undo`` is called."""

    def at(batch: int, error: type[BaseException] = RuntimeError) -> None:
        calls, pool = [], AfterEncoder.forward

        def failing(*arguments):
            calls.append(1)
            if len(calls) == batch:
                raise error("stopped")
            return pool(*arguments)

        monkeypatch.setattr(AfterEncoder, "forward", failing)

    return at


def only(folder: Path, *names: str) -> bool:
    return sorted(path.name for path in folder.iterdir()) == sorted(names)


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_stopped_twice_gives_the_same_file(encode, stop, monkeypatch, tmp_path, suffix):
    whole, target = tmp_path / f"whole{suffix}", tmp_path / f"rows{suffix}"
    assert encode(whole).exit_code == 0
    kept = 0
    for batch in (30, 11):
        stop(batch)
        assert "the same command continues after them" in encode(target).output
        monkeypatch.undo()
        assert only(tmp_path, whole.name, f"{target.name}.partial")
        rows = json.loads(
            (tmp_path / f"{target.name}.partial" / "state.json").read_text(encoding="utf-8")
        )["rows"]
        assert rows > kept
        kept = rows
    result = encode(target, "--json")
    assert result.exit_code == 0
    assert f"resuming after {kept} of 100 rows" in result.output
    assert json.loads(result.stdout[result.stdout.index("{") :])["resumed"] == kept
    assert whole.read_bytes() == target.read_bytes()
    assert only(tmp_path, whole.name, target.name)


def test_totals_are_those_of_the_whole_run(encode, stop, monkeypatch, tmp_path):
    def summary(result):
        content = json.loads(result.stdout[result.stdout.index("{") :])
        return [content[name] for name in ("texts", "tokens", "truncated", "shape")]

    options = ("--max-length", 9, "--json")
    undisturbed = summary(encode(tmp_path / "whole.npy", *options))
    stop(30)
    encode(tmp_path / "rows.npy", *options)
    monkeypatch.undo()
    assert summary(encode(tmp_path / "rows.npy", *options)) == undisturbed
    assert undisturbed[2] > 10


def test_stopped_before_the_first_window_leaves_nothing(encode, stop, tmp_path):
    stop(3)
    result = encode(tmp_path / "rows.npy")
    assert isinstance(result.exception, RuntimeError)
    assert "stopped:" not in result.output
    assert only(tmp_path)


def test_stopped_while_the_parquet_is_written(encode, monkeypatch, tmp_path):
    def half(rows, path, ids):
        path.write_bytes(b"PAR1")
        raise OSError("disk full")

    monkeypatch.setattr(job, "write_embeddings", half)
    result = encode(tmp_path / "rows.parquet")
    assert result.exit_code == 2
    assert "100 of 100 rows are kept" in result.output
    assert only(tmp_path, "rows.parquet.partial")
    monkeypatch.undo()
    assert "resuming after 100" in encode(tmp_path / "rows.parquet").output
    assert encode(tmp_path / "whole.parquet").exit_code == 0
    whole = (tmp_path / "whole.parquet").read_bytes()
    assert (tmp_path / "rows.parquet").read_bytes() == whole


def test_control_c_says_how_to_go_on(encode, stop, tmp_path):
    stop(30, KeyboardInterrupt)
    result = encode(tmp_path / "rows.npy")
    assert result.exit_code == 130
    assert "rows.npy.partial; the same command continues after them" in result.output


def test_killed(encode, model_folder, source, tmp_path):
    target, whole = tmp_path / "rows.npy", tmp_path / "whole.npy"
    arguments = ("encode", model_folder, source, target, *OPTIONS)
    result = _fresh_python.run("-c", KILLED, *arguments)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert only(tmp_path, "rows.npy.partial")
    # A power failure may leave bytes after the finished rows. A resumed run must not read these
    # bytes.
    with (tmp_path / "rows.npy.partial" / "rows.npy").open("ab") as file:
        file.write(b"\0" * 1000)
    assert "resuming after" in encode(target).output
    assert encode(whole).exit_code == 0
    assert target.read_bytes() == whole.read_bytes()
    assert only(tmp_path, "rows.npy", "whole.npy")


def another_model(folder: Path, where: Path) -> Path:
    shutil.copytree(folder, where)
    torch.manual_seed(1)
    BertForMaskedLM(BertForMaskedLM.from_pretrained(folder).config).save_pretrained(where)
    return where


def another_tokenizer(folder: Path, where: Path) -> Path:
    shutil.copytree(folder, where)
    path = where / "tokenizer.json"
    path.write_text(
        path.read_text(encoding="utf-8").replace('"lowercase": true', '"lowercase": false')
    )
    assert path.read_bytes() != (folder / "tokenizer.json").read_bytes()
    return where


def another_input(source: Path, where: Path) -> Path:
    where.write_text(
        source.read_text(encoding="utf-8").removesuffix(".\n") + "!\n", encoding="utf-8"
    )
    return where


@pytest.mark.parametrize(
    "named", ["pooling", "normalize", "max_length", "tokens_per_batch", "backend"]
)
def test_other_options_start_anew(encode, stop, monkeypatch, tmp_path, named):
    values = {
        "pooling": ("--pooling", "cls"),
        "normalize": ("--normalize",),
        "max_length": ("--max-length", 7),
        "tokens_per_batch": ("--tokens-per-batch", 20),
        "backend": ("--backend", "reference"),
    }
    starts_anew(encode, stop, monkeypatch, tmp_path, named, *values[named])


def test_another_model_or_input_starts_anew(
    encode, stop, monkeypatch, tmp_path, model_folder, source
):
    for index, make in enumerate((another_model, another_tokenizer)):
        folder = make(model_folder, tmp_path / f"model{index}")
        starts_anew(encode, stop, monkeypatch, tmp_path, "model", model=folder)
    other = another_input(source, tmp_path / "other.txt")
    starts_anew(encode, stop, monkeypatch, tmp_path, "input", texts=other)


def starts_anew(encode, stop, monkeypatch, tmp_path, named, *options, **others):
    target, whole = tmp_path / "rows.npy", tmp_path / "whole.npy"
    stop(30)
    encode(target)
    monkeypatch.undo()
    result = encode(target, *options, **others)
    assert f"is of a run with another {named}: starting from the first row" in result.output
    assert encode(whole, *options, **others).exit_code == 0
    assert target.read_bytes() == whole.read_bytes()


def test_the_old_file_stays_until_the_new_one_is_whole(encode, stop, tmp_path):
    (tmp_path / "rows.npy").write_text("old")
    stop(30)
    encode(tmp_path / "rows.npy")
    assert (tmp_path / "rows.npy").read_text(encoding="utf-8") == "old"


def test_an_input_that_changes_under_the_run(encode, monkeypatch, tmp_path, source):
    texts, pool = tmp_path / "texts.txt", AfterEncoder.forward
    shutil.copy(source, texts)

    def change(*arguments):
        texts.write_text("something else\n" * 100)
        return pool(*arguments)

    monkeypatch.setattr(AfterEncoder, "forward", change)
    monkeypatch.setattr(encode_module, "Texts", small_blocks(encode_module.Texts))
    result = encode(tmp_path / "rows.npy", texts=texts)
    assert "changed while it was read" in result.output
    assert only(tmp_path, "texts.txt")


def small_blocks(kind):
    """Return a subclass of `kind` that reads line by line, as a large file is read in blocks."""

    class Small(kind):
        def _lines(self, fields):
            index = 0
            while index < len(lines := self.path.read_text(encoding="utf-8").splitlines()):
                yield Row(f"line {index + 1}", (lines[index],))
                index += 1

    return Small


def test_damaged_rows_start_anew(encode, stop, monkeypatch, tmp_path):
    stop(30)
    encode(tmp_path / "rows.npy")
    monkeypatch.undo()
    (tmp_path / "rows.npy.partial" / "rows.npy").write_bytes(b"short")
    assert "is damaged: starting from the first row" in encode(tmp_path / "rows.npy").output
    assert np.load(tmp_path / "rows.npy").shape == (100, 32)


def test_two_runs_into_one_file(encode, tmp_path):
    with PartialOutput(tmp_path / "rows.npy", (100, 32), {}):
        result = encode(tmp_path / "rows.npy")
    assert result.exit_code == 2
    assert "another run is writing" in result.output


def test_a_folder_of_the_users_is_left_alone(encode, tmp_path):
    folder = tmp_path / "rows.npy.partial"
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    result = encode(tmp_path / "rows.npy")
    assert result.exit_code == 2
    assert "holds thesis.tex, allowed: an unfinished run" in result.output
    assert only(folder, "thesis.tex")
