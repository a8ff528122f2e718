"""A stopped prediction continues where it stopped, and OUT appears only when it is complete."""

from __future__ import annotations

import json
import signal
from contextlib import contextmanager
from pathlib import Path

import _fresh_python
import pytest
from finetuning_problems import reviews, run, write_rows
from test_answer_task import questions

from fastbert.finetuning import evaluate, predict
from fastbert.jobs import batch_job
from fastbert.jobs.reporter import Reporter

KILLED = """
import os, sys
import fastbert.finetuning.evaluate as evaluate
from fastbert.finetuning import predict
from fastbert.jobs import batch_job
evaluate.TOKENS_PER_BATCH, batch_job.WINDOW_BATCHES = 64, 2
calls, compute = [], evaluate.compute
def killed(*arguments):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), 9)
    return compute(*arguments)
evaluate.compute = killed
predict(*sys.argv[1:])
"""


class Told(Reporter):
    """A reporter that records its messages and its progress."""

    def __init__(self):
        self.notes, self.began, self.done = [], None, 0

    def note(self, text):
        self.notes.append(text)

    @contextmanager
    def progress(self, total, done):
        self.began, self.done = (total, done), done

        def advance(count):
            self.done += count

        yield advance


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(evaluate, "TOKENS_PER_BATCH", 64)
    monkeypatch.setattr(batch_job, "WINDOW_BATCHES", 2)


def stop(monkeypatch, window):
    """Interrupt the next prediction before it computes the window with the number `window`.

    A window is the batches between two writes of the output. Numbers count from 1.
    """
    calls, compute = [], evaluate.compute

    def stopped(*arguments):
        calls.append(1)
        if len(calls) == window:
            raise KeyboardInterrupt
        return compute(*arguments)

    monkeypatch.setattr(evaluate, "compute", stopped)


TASKS = ("classify", "tag", "answer")


@pytest.fixture(scope="module", params=TASKS)
def fine_tuned(request, pretrained, tmp_path_factory):
    """Return the folder of a fine-tuned model, and a data file that needs several windows."""
    from fastbert.finetuning import AnswerOptions, ClassifyOptions, TagOptions

    folder = tmp_path_factory.mktemp(request.param)
    rows = {
        "classify": reviews(60, 1),
        "tag": [
            {"tokens": row["text"].split(), "tags": ["B-X", *["O"] * row["text"].count(" ")]}
            for row in reviews(60, 1)
        ],
        "answer": questions(40, 1, length=40),
    }[request.param]
    kinds = {"classify": ClassifyOptions, "tag": TagOptions, "answer": AnswerOptions}
    data = write_rows(folder / "data.jsonl", rows)
    options = kinds[request.param](model=pretrained, data=data, output=folder / "out", epochs=1)
    return run(options)[0].model, data


def test_a_stopped_prediction_goes_on(fine_tuned, small_windows, monkeypatch, tmp_path):
    model, data = fine_tuned
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    told = Told()
    result = predict(model, data, whole, reporter=told)
    assert told.notes == []
    assert told.began == (result.sequences, 0)
    assert told.done == result.sequences
    for window in (1, 3, 2):
        with monkeypatch.context() as patch:
            stop(patch, window)
            with pytest.raises(KeyboardInterrupt):
                predict(model, data, cut)
        assert not cut.exists()
    told = Told()
    again = predict(model, data, cut, reporter=told)
    assert 0 < again.resumed < again.sequences
    assert told.began == (again.sequences, again.resumed)
    assert told.done == again.sequences
    assert told.notes[0].startswith("resuming after ")
    assert cut.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.jsonl", "whole.jsonl"]


def test_a_killed_prediction_goes_on(fine_tuned, small_windows, tmp_path):
    model, data = fine_tuned
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    predict(model, data, whole)
    killed = _fresh_python.run("-c", KILLED, model, data, cut)
    assert killed.returncode == -signal.SIGKILL
    assert not cut.exists()
    assert predict(model, data, cut).resumed > 0
    assert cut.read_bytes() == whole.read_bytes()


def test_another_run_starts_again(fine_tuned, small_windows, monkeypatch, tmp_path):
    model, data = fine_tuned
    cut, told = tmp_path / "cut.jsonl", Told()
    with monkeypatch.context() as patch:
        stop(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            predict(model, data, cut)
    assert predict(model, data, cut, backend="reference", reporter=told).resumed == 0
    assert "of a run with another backend: starting from the first row" in told.notes[0]


def test_the_size_of_the_windows_does_not_matter(fine_tuned, monkeypatch, tmp_path):
    model, data = fine_tuned
    predict(model, data, tmp_path / "one.jsonl")
    monkeypatch.setattr(evaluate, "TOKENS_PER_BATCH", 64)
    monkeypatch.setattr(batch_job, "WINDOW_BATCHES", 2)
    predict(model, data, tmp_path / "many.jsonl")
    one, many = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text("utf-8").splitlines()]
        for name in ("one", "many")
    )
    for first, second in zip(one, many, strict=True):
        assert first.keys() == second.keys()
        for name, value in first.items():
            number = isinstance(value, (float, dict))
            assert second[name] == (pytest.approx(value, rel=1e-4, abs=1e-5) if number else value)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_ids_are_carried_into_out(classify, tmp_path, suffix):
    rows = [{"number": f"r{i}", **row} for i, row in enumerate(reviews(12, 0))]
    data = write_rows(tmp_path / f"data{suffix}", rows)
    model = run(classify(data, epochs=1))[0].model
    output = tmp_path / "said.jsonl"
    predict(model, data, output, id_field="number")
    said = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in said] == [row["number"] for row in rows]
    assert said[0].keys() == {"id", "label", "score", "scores"}
    with pytest.raises(ValueError, match="nothing"):
        predict(model, data, tmp_path / "other.jsonl", id_field="nothing")
    assert not (tmp_path / "other.jsonl").exists()


def test_integers_stay_integers_and_sentences_have_ids(tag, tmp_path):
    rows = [{"idx": i + 5, "tokens": ["dog"], "tags": ["O" if i % 2 else "B-X"]} for i in range(12)]
    data = write_rows(tmp_path / "data.jsonl", rows)
    model = run(tag(data, epochs=1))[0].model
    predict(model, data, tmp_path / "said.jsonl", id_field="idx")
    said = (tmp_path / "said.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["id"] for line in said] == list(range(5, 17))


def test_ids_of_data_without_fields_are_refused(tag, answer, tmp_path):
    lines = tmp_path / "data.conll"
    lines.write_text("dog B-X\nran O\n\n" * 8)
    model = run(tag(lines, epochs=1))[0].model
    with pytest.raises(ValueError, match=r"id_field: got 'id', allowed: None for .*data\.conll; o"):
        predict(model, lines, tmp_path / "said.jsonl", id_field="id")
    asked = write_rows(tmp_path / "asked.jsonl", questions(8, 0))
    model = run(answer(asked, epochs=1, output=tmp_path / "second"))[0].model
    with pytest.raises(ValueError, match="id_field: got 'id', allowed: None for questions, which"):
        predict(model, asked, tmp_path / "said.jsonl", id_field="id")


def test_a_folder_of_another_program_is_not_touched(classify, tmp_path):
    data = write_rows(tmp_path / "data.csv", reviews(12, 0))
    model = run(classify(data, epochs=1))[0].model
    folder = Path(tmp_path / "said.jsonl.partial")
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds mine\.txt, allowed: an unfinished run"):
        predict(model, data, tmp_path / "said.jsonl")
    assert (folder / "mine.txt").read_text() == "mine"
