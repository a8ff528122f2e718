"""``fastbert finetune`` trains a model, and ``fastbert predict`` applies the model to a file."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest

from fastbert.cli.finetune import classify, qa, tag
from fastbert.finetuning import AnswerOptions, ClassifyOptions, TagOptions

OPTIONS = {
    "classify": (classify, ClassifyOptions),
    "tag": (tag, TagOptions),
    "qa": (qa, AnswerOptions),
}
FAST = ("--epochs", 1, "--batch-size", 4)


@pytest.fixture
def reviews(tmp_path):
    path = tmp_path / "reviews.csv"
    rows = ["the old mill,pos", "a dog ran,neg"] * 8
    path.write_text("\n".join(["body,label", *rows]))
    return path


@pytest.mark.parametrize("name", OPTIONS)
def test_options_and_defaults_are_those_of_the_library(name):
    command, options = OPTIONS[name]
    parameters = dict(inspect.signature(command).parameters)
    assert parameters.pop("as_json").default is False
    fields = {field.name: field for field in dataclasses.fields(options)}
    assert parameters.keys() == fields.keys()
    for key, parameter in parameters.items():
        if key not in ("model", "data", "output", "labels"):
            assert parameter.default == fields[key].default, key


@pytest.mark.parametrize("name", OPTIONS)
def test_help_of_a_task_ends_with_an_example(run, name):
    result = run("finetune", name, "--help")
    assert result.exit_code == 0
    assert f"Example: fastbert finetune {name} " in result.stdout
    assert "--json" in result.stdout


def test_help_lists_every_task(run):
    result = run("finetune", "--help")
    assert result.exit_code == 0
    for name in OPTIONS:
        assert f" {name} " in result.stdout


def test_trains_resumes_and_predicts(run, model_folder, reviews, tmp_path):
    command = ("finetune", "classify", model_folder, reviews, "-o", tmp_path / "out", *FAST)
    result = run(*command, "--text-field", "body", "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["model"] == str(tmp_path / "out" / "model")
    assert content["figures"]["train"]["examples"] == 14
    again = run(*command, "--text-field", "body")
    assert "resumed after step 4 of 4" in again.output
    assert "accuracy" in again.stdout
    assert str(tmp_path / "out" / "metrics.json") in again.stdout

    said = tmp_path / "said.jsonl"
    told = run("predict", tmp_path / "out" / "model", reviews, said, "--text-field", "body")
    assert told.exit_code == 0, told.output
    assert f"16 examples → {said}" in told.stdout
    lines = [json.loads(line) for line in said.read_text(encoding="utf-8").splitlines()]
    assert {line["label"] for line in lines} <= {"pos", "neg"}
    # The command ``fastbert classify`` gives the same scores.
    texts = tmp_path / "texts.txt"
    texts.write_text("the old mill\na dog ran\n")
    run("classify", tmp_path / "out" / "model", texts, tmp_path / "labels.jsonl")
    labels = [
        json.loads(line)
        for line in (tmp_path / "labels.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    for ours, stock in zip(lines, labels, strict=False):
        assert ours["scores"] == pytest.approx(stock["scores"], abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--epochs", 0), "epochs: got 0, allowed: an integer >= 1"),
        (("--backend", "rocm"), "backend: got 'rocm'"),
        (("--labels", "pos"), "labels: got pos, allowed: at least two different names"),
        (("--text-field", "words"), "reviews.csv, line 1: no column 'words', allowed: body, label"),
        (("--labels", "good,bad", "--text-field", "body"), "reviews.csv, line 2: got the label"),
        (("--class-weights", "even"), "--class-weights: got 'even', allowed: 'balanced', or NAME="),
        (("--keep-epoch", "first"), "--keep-epoch: got 'first', allowed: best, last"),
        (("--test", "nowhere.csv"), "test: nowhere.csv does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    run, model_folder, reviews, tmp_path, arguments, named
):
    result = run("finetune", "classify", model_folder, reviews, "-o", tmp_path / "out", *arguments)
    assert result.exit_code == 2, result.output
    last = result.output.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert named in last
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_predict_names_a_mistake(refused, model_folder, reviews, tmp_path):
    message = refused("predict", model_folder, reviews, tmp_path / "said.jsonl")
    assert "is a BertForMaskedLM, allowed: BertForSequenceClassification" in message


def test_weights_and_patience_reach_the_run(run, model_folder, reviews, tmp_path):
    command = ("finetune", "classify", model_folder, reviews, "-o", tmp_path / "out", "--json")
    more = ("--text-field", "body", "--class-weights", "neg=1,pos=2", "--patience", 1)
    result = run(*command, *more, "--epochs", 9, "--learning-rate", 1e-30)
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["stopped_early"]
    # The learning rate is tiny, so the second evaluation is no better than the first evaluation.
    assert content["kept"] == {"epoch": 1, "step": 1}
    assert content["best"]["figure"] == "accuracy"
    written = json.loads((tmp_path / "out" / "metrics.json").read_text(encoding="utf-8"))
    assert written["options"]["class_weights"] == {"neg": 1.0, "pos": 2.0}


def test_several_labels_are_trained_and_predicted(run, model_folder, tmp_path):
    data = tmp_path / "train.tsv"
    data.write_text("text\tlabel\n" + "old mill\ta;b\na dog\t\nmill\tb\nran\ta\n" * 4)
    command = ("finetune", "classify", model_folder, data, "-o", tmp_path / "out", *FAST, "--json")
    result = run(*command, "--multi-label", "--label-separator", ";")
    assert result.exit_code == 0, result.output
    assert "micro_f1" in json.loads(result.stdout)["figures"]["validation"]
    said = tmp_path / "said.jsonl"
    told = run("predict", tmp_path / "out" / "model", data, said, "--threshold", 0.01)
    assert told.exit_code == 0, told.output
    for line in map(json.loads, said.read_text(encoding="utf-8").splitlines()):
        assert line["scores"].keys() == {"a", "b"}
        assert line["labels"] == [name for name in "ab" if line["scores"][name] > 0.01]


def test_tags_are_trained_and_predicted(run, model_folder, tmp_path):
    data = tmp_path / "train.conll"
    data.write_text("the O\nmill B-LOC\n\na O\ndog O\n\n" * 4)
    command = ("finetune", "tag", model_folder, data, "-o", tmp_path / "out", *FAST, "--json")
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert "f1" in json.loads(result.stdout)["figures"]["validation"]
    told = run("predict", tmp_path / "out" / "model", data, tmp_path / "said.jsonl", "--json")
    assert json.loads(told.stdout)["examples"] == 8
    first = json.loads((tmp_path / "said.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first["words"] == ["the", "mill"]
    assert set(first["tags"]) <= {"O", "B-LOC"}


def test_answers_are_trained_and_predicted(run, model_folder, tmp_path):
    data = tmp_path / "train.jsonl"
    answers = {"text": ["mill"], "answer_start": [8]}
    rows = [
        {"id": str(i), "question": "where?", "context": f"the old mill {i}", "answers": answers}
        for i in range(8)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("finetune", "qa", model_folder, data, "-o", tmp_path / "out", *FAST, "--stride", 4)
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert "exact match" in result.stdout
    told = run("predict", tmp_path / "out" / "model", data, tmp_path / "said.jsonl")
    assert told.exit_code == 0, told.output
    said = [
        json.loads(line)
        for line in (tmp_path / "said.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["id"] for row in said] == [row["id"] for row in rows]
    official = tmp_path / "said.json"
    options = ("--stride", 2, "--longest-answer", 9, "--no-answer-threshold", 1000)
    told = run("predict", tmp_path / "out" / "model", data, official, *options)
    assert told.exit_code == 0, told.output
    assert json.loads(official.read_text(encoding="utf-8")).keys() == {row["id"] for row in rows}
    for row, asked in zip(said, rows, strict=True):
        assert row["answer"]
        assert row["answer"] in asked["context"]
