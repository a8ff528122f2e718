"""Texts with several labels are learned, scored like in scikit-learn, and load in transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from finetuning_problems import NAMES, OTHERS, PLACES, run, write_rows
from sklearn import metrics as sk

from fastbert.finetuning import metrics, predict
from fastbert.finetuning.multi_label import MultiLabel

LABELS = ("animal", "place")


def texts(count: int, seed: int, form=list) -> list[dict]:
    """Return texts with one label for each kind of name, animal or place, in the text."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        labels = [label for label in LABELS if draw.random() < 0.5]
        words = [draw.choice(NAMES if label == "animal" else PLACES) for label in labels]
        words += draw.choices(OTHERS, k=3)
        draw.shuffle(words)
        rows.append({"text": " ".join(words), "label": form(labels)})
    return rows


@pytest.fixture
def several(classify):
    return lambda data, **options: classify(data, multi_label=True, **options)


def said(model, data: Path, output: Path, **options) -> list[dict]:
    predict(model, data, output, **options)
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def matrix(labels: list[list[str]]) -> np.ndarray:
    return np.array([[name in row for name in LABELS] for row in labels])


def test_learns_writes_and_predicts(several, tmp_path):
    train = write_rows(tmp_path / "train.jsonl", texts(300, 0))
    test = write_rows(tmp_path / "held.jsonl", texts(80, 1))
    result, text = run(several(train, test=test, epochs=8))
    figures = result.figures["test"]
    assert figures["subset_accuracy"] >= 0.9
    assert "kept: the model after epoch" in text
    assert "the best by micro F1" in text
    assert result.confusion is None
    predictions = said(result.model, test, tmp_path / "said.jsonl")
    expected = matrix([row["label"] for row in texts(80, 1)])
    given = matrix([row["labels"] for row in predictions])
    assert not expected.any(1).all()
    assert figures["subset_accuracy"] == pytest.approx(sk.accuracy_score(expected, given))
    for average in ("micro", "macro"):
        score = sk.f1_score(expected, given, average=average)
        assert figures[f"{average}_f1"] == pytest.approx(score)
    for row in predictions:
        assert row["labels"] == [name for name in LABELS if row["scores"][name] > 0.5]
    scores = np.array([[row["scores"][name] for name in LABELS] for row in predictions])
    loss = -np.log(np.where(expected, scores, 1 - scores)).mean()
    assert figures["loss"] == pytest.approx(loss, rel=1e-3)
    high = said(result.model, test, tmp_path / "high.jsonl", threshold=0.9)
    for row in high:
        assert row["labels"] == [name for name in LABELS if row["scores"][name] > 0.9]


def test_transformers_gives_the_same_scores(several, tmp_path):
    transformers = pytest.importorskip("transformers")
    train = write_rows(tmp_path / "train.jsonl", texts(40, 0))
    result, _ = run(several(train, epochs=1))
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(result.model).eval()
    assert stock.config.problem_type == "multi_label_classification"
    assert stock.config.id2label == dict(enumerate(LABELS))
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.model)
    batch = tokenizer([row["text"] for row in texts(40, 0)], padding=True, return_tensors="pt")
    targets = torch.tensor(matrix([row["label"] for row in texts(40, 0)])).float()
    with torch.no_grad():
        output = stock(**batch, labels=targets)
    predictions = said(result.model, train, tmp_path / "said.jsonl")
    scores = torch.tensor([[row["scores"][name] for name in LABELS] for row in predictions])
    torch.testing.assert_close(scores, output.logits.sigmoid(), rtol=1e-4, atol=1e-5)
    pipeline = transformers.pipeline("text-classification", stock, tokenizer=tokenizer)
    first = {row["label"]: row["score"] for row in pipeline(texts(1, 0)[0]["text"], top_k=None)}
    assert predictions[0]["scores"] == pytest.approx(first, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "entries"),
    [
        ({"problem_type": "multi_label_classification", "num_labels": 3}, {"labels", "scores"}),
        ({"problem_type": "multi_label_classification", "num_labels": 1}, {"labels", "scores"}),
        ({"problem_type": "regression", "num_labels": 1}, {"score"}),
        ({"problem_type": "regression", "num_labels": 3}, {"scores"}),
        ({"problem_type": "single_label_classification", "num_labels": 1}, {"labels", "scores"}),
        ({"num_labels": 1}, {"labels", "scores"}),
        ({"num_labels": 3}, {"label", "score", "scores"}),
    ],
)
def test_a_model_of_transformers_predicts_as_its_pipeline(pretrained, tmp_path, settings, entries):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(pretrained, **settings)
    stock = transformers.BertForSequenceClassification(config).eval()
    for target in (stock, tokenizer):
        target.save_pretrained(tmp_path / "stock")
    rows = [{key: row[key] for key in ("text",)} for row in texts(6, 0)]
    data = write_rows(tmp_path / "data.jsonl", rows)
    predictions = said(tmp_path / "stock", data, tmp_path / "said.jsonl")
    pipeline = transformers.pipeline("text-classification", stock, tokenizer=tokenizer)
    for row, ours in zip(rows, predictions, strict=True):
        assert ours.keys() == entries
        scores = {s["label"]: s["score"] for s in pipeline(row["text"], top_k=None)}
        if "scores" not in ours:
            ours["scores"] = {"LABEL_0": ours["score"]}
        assert ours["scores"] == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize(
    ("suffix", "form", "options"),
    [
        (".csv", ",".join, {}),
        (".tsv", ", ".join, {}),
        (".csv", ";".join, {"label_separator": ";"}),
        (".tsv", "|".join, {"label_separator": "|"}),
        (".jsonl", ",".join, {}),
        (".parquet", list, {}),
        (".parquet", ",".join, {}),
    ],
)
def test_the_format_of_the_labels_does_not_matter(several, tmp_path, suffix, form, options):
    first = write_rows(tmp_path / "train.jsonl", texts(40, 0))
    run(several(first, epochs=1))
    other = write_rows(tmp_path / f"other{suffix}", texts(40, 0, form))
    finished = several(other, epochs=1)
    if options:
        finished = several(other, epochs=1, output=tmp_path / "second", **options)
        result, _ = run(finished)
        assert result.figures == run(several(first, epochs=1))[0].figures
        return
    assert "resumed after step" in run(finished)[1]


def test_several_labels_without_the_option_name_it(classify, tmp_path):
    data = write_rows(tmp_path / "train.jsonl", texts(8, 0))
    with pytest.raises(ValueError, match=r"line 1: got the labels .*, allowed: one label, or seve"):
        run(classify(data))


def test_indices_of_named_labels(several, tmp_path):
    def numbers(labels):
        return ",".join(str(LABELS.index(label)) for label in labels)

    path = write_rows(tmp_path / "train.tsv", texts(40, 0, numbers))
    result, _ = run(several(path, labels=LABELS, epochs=1))
    assert result.figures["train"]["labels"].keys() == set(LABELS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a,,b", "got the label '', allowed: a name or an integer"),
        ("['a', 'b']", "got the labels \"['a', 'b']\", allowed: labels with ',' between them, wi"),
        (None, "got the labels None, allowed: a list, or a text with ',' between two labels"),
        (["a", 1.5], "got the label 1.5, allowed: a name or an integer"),
    ],
)
def test_wrong_labels_name_their_line(several, tmp_path, value, message):
    rows = [*texts(3, 0), {"text": "dog", "label": value}]
    data = write_rows(tmp_path / "train.jsonl", rows)
    with pytest.raises(ValueError) as failure:
        run(several(data))
    assert str(failure.value).startswith(f"{data}, line 4: {message}")
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_fit_are_refused(several, classify, tmp_path):
    with pytest.raises(ValueError, match="multi_label and regression: got"):
        several("data", regression=True)
    with pytest.raises(ValueError, match="class_weights and multi_label: got"):
        several("data", class_weights="balanced")
    with pytest.raises(ValueError, match="label_separator: got '', allowed: a text that is not"):
        several("data", label_separator="")
    for part in LABELS:
        (tmp_path / "folder" / "train" / part).mkdir(parents=True)
        (tmp_path / "folder" / "train" / part / "0.txt").write_text("dog")
    with pytest.raises(ValueError, match="multi_label: got True, allowed: False for a folder"):
        run(several(tmp_path / "folder"))
    one = [{**row, "label": "x" if row["label"] else "y"} for row in texts(8, 0)]
    data = write_rows(tmp_path / "one.jsonl", one)
    model = run(classify(data, epochs=1))[0].model
    with pytest.raises(ValueError, match=r"threshold: got 0.5, allowed: None, because .* does not"):
        predict(model, data, tmp_path / "said.jsonl", threshold=0.5)
    with pytest.raises(ValueError, match="threshold: got 1, allowed: a number between 0 and 1"):
        predict(model, data, tmp_path / "said.jsonl", threshold=1)


@pytest.mark.parametrize("seed", range(5))
def test_figures_are_those_of_scikit_learn(seed):
    draw = np.random.default_rng(seed)
    expected, predicted = draw.random((2, 12, 5)) < draw.random((2, 1, 5)) / 2
    figures = metrics.multi_label(expected, predicted, list("abcde"))
    for average in ("micro", "macro"):
        # A label that is neither expected nor predicted has an undefined F1.
        score = sk.f1_score(expected, predicted, average=average, zero_division=np.nan)
        assert figures[f"{average}_f1"] == pytest.approx(np.nan_to_num(score))
    assert figures["subset_accuracy"] == pytest.approx(sk.accuracy_score(expected, predicted))


def test_a_score_at_the_threshold_is_not_above_it():
    logits = torch.tensor([[0.0, 1e-6]])
    assert MultiLabel().answers(logits, ["a", "b"])[0]["labels"] == ["b"]
