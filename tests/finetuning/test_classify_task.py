"""Classification and regression learn, write their files, and load in transformers.

The figures agree with those of scikit-learn and scipy.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from finetuning_problems import NAMES, OTHERS, reviews, run, write_rows
from scipy import stats
from sklearn import metrics as sk

from fastbert.finetuning import predict
from fastbert.finetuning.finetuning_run import FinetuningRun
from fastbert.modules import BertForSequenceClassification
from fastbert.training.log import read_log


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for number, (part, count) in enumerate({"train": 160, "dev": 40, "test": 60}.items()):
        write_rows(tmp_path / "data" / f"{part}.csv", reviews(count, number))
    return tmp_path / "data"


def predictions(result, data: Path, tmp_path: Path, **options) -> list[dict]:
    predict(result.model, data, tmp_path / "said.jsonl", **options)
    return [
        json.loads(line)
        for line in (tmp_path / "said.jsonl").read_text(encoding="utf-8").splitlines()
    ]


@pytest.fixture
def trained(classify, data):
    return run(classify(data))


def test_learns_writes_and_predicts(drawn, trained, data, tmp_path):
    result, text = trained
    assert "examples: 160 train, 40 validation, 60 test" in text
    assert result.figures["validation"]["accuracy"] >= 0.95
    assert result.figures["test"]["accuracy"] >= 0.95
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("model", "checkpoints", "log.jsonl", "metrics.json", "curves.png", "confusion.png"),
    }
    for name in ("curves.png", "confusion.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    written = json.loads(result.metrics.read_text(encoding="utf-8"))
    assert written["parts"] == json.loads(json.dumps(result.figures))
    rows = read_log(result.log)
    assert [row["step"] for row in rows if row["event"] == "evaluation"] == [20, 40, 60]
    assert rows[-1]["accuracy"] == result.figures["validation"]["accuracy"]

    said = predictions(result, data / "test.csv", tmp_path)
    expected = [row["label"] for row in reviews(60, 2)]
    given = [row["label"] for row in said]
    figures = result.figures["test"]
    assert figures["accuracy"] == pytest.approx(sk.accuracy_score(expected, given))
    assert figures["macro_f1"] == pytest.approx(sk.f1_score(expected, given, average="macro"))
    correlation = sk.matthews_corrcoef(expected, given)
    assert figures["matthews_correlation"] == pytest.approx(correlation)
    for row in said:
        assert sum(row["scores"].values()) == pytest.approx(1.0)
        assert row["score"] == row["scores"][row["label"]] == max(row["scores"].values())
    chosen = [row["scores"][label] for row, label in zip(said, expected, strict=True)]
    assert figures["loss"] == pytest.approx(-np.log(chosen).mean(), rel=1e-4)


def test_transformers_opens_the_result_with_the_same_logits(trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = trained[0].model
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert stock.config.id2label == {0: "animal", 1: "place"}
    assert stock.config.problem_type == "single_label_classification"
    ours = BertForSequenceClassification.from_pretrained(folder)
    batch = tokenizer([row["text"] for row in reviews(8, 3)], padding=True, return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch).logits, stock(**batch).logits)
    pipeline = transformers.pipeline("text-classification", model=stock, tokenizer=tokenizer)
    assert pipeline("dog ran the old")[0]["label"] == "animal"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".tsv"])
def test_the_format_of_the_data_does_not_matter(classify, data, tmp_path, suffix):
    options = classify(data / "train.csv", epochs=1)
    expected, _ = run(options)
    other = write_rows(tmp_path / f"rows{suffix}", reviews(160, 0))
    # Equal examples in another format are the same data, so fastbert recognises the finished run.
    result, text = run(classify(other, epochs=1))
    assert "resumed after step 18 of 18" in text
    assert result.figures == expected.figures


def test_a_folder_of_texts_as_of_imdb(classify, tmp_path):
    for number, (part, count) in enumerate({"train": 96, "test": 32}.items()):
        for index, row in enumerate(reviews(count, number)):
            path = tmp_path / "imdb" / part / row["label"] / f"{index}_7.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(row["text"])
    (tmp_path / "imdb" / "train" / "unsup").mkdir()
    (tmp_path / "imdb" / "train" / "unsup" / "0_0.txt").write_text("no label")
    (tmp_path / "imdb" / "train" / "urls.txt").write_text("not a text")
    result, text = run(classify(tmp_path / "imdb", epochs=6))
    assert "examples: 86 train, 10 validation, 32 test" in text
    assert result.figures["test"]["accuracy"] >= 0.9
    said = predictions(result, tmp_path / "imdb" / "test", tmp_path)
    assert len(said) == 32


def test_pairs_are_compared(classify, tmp_path):
    draw = random.Random(0)

    def pairs(count: int) -> list[dict]:
        rows = []
        for _ in range(count):
            first, second = draw.choice(NAMES), draw.choice(NAMES[:2])
            rows.append({"a": first, "b": second, "label": int(second == NAMES[0])})
        return rows

    train, test = (
        write_rows(tmp_path / f"{name}.jsonl", pairs(count))
        for name, count in (("one", 160), ("two", 40))
    )
    options = {"text_field": "a", "pair_field": "b", "test": test}
    result, _ = run(classify(train, **options))
    # Only the second text decides the label, so a model that does not see it can only guess.
    assert result.figures["test"]["accuracy"] >= 0.95
    assert result.figures["test"]["labels"].keys() == {"0", "1"}
    said = predictions(result, test, tmp_path, text_field="a", pair_field="b")
    assert len(said) == 40


def test_regression_learns_a_number(classify, tmp_path):
    draw = random.Random(0)
    values = dict(zip(NAMES, (-1.0, -0.5, 0.0, 0.5, 1.0), strict=True))

    def rows(count: int) -> list[dict]:
        lines = []
        for _ in range(count):
            name = draw.choice(NAMES)
            text = " ".join([name, *draw.choices(OTHERS, k=3)])
            lines.append({"text": text, "label": values[name]})
        return lines

    train = write_rows(tmp_path / "train.csv", rows(200))
    checked = rows(60)
    test = write_rows(tmp_path / "held.csv", checked)
    result, _ = run(classify(train, test=test, regression=True, epochs=4))
    figures = result.figures["test"]
    assert figures["pearson"] >= 0.9
    given = [row["score"] for row in predictions(result, test, tmp_path)]
    expected = [row["label"] for row in checked]
    assert figures["pearson"] == pytest.approx(stats.pearsonr(expected, given)[0], abs=1e-5)
    assert figures["spearman"] == pytest.approx(stats.spearmanr(expected, given)[0], abs=1e-5)
    error = sk.mean_squared_error(expected, given)
    assert figures["mean_squared_error"] == pytest.approx(error, rel=1e-4)
    assert figures["loss"] == pytest.approx(error, rel=1e-4)
    assert result.confusion is None
    content = json.loads((result.model / "config.json").read_text(encoding="utf-8"))
    assert content["problem_type"] == "regression"
    assert len(content["id2label"]) == 1


def test_names_of_labels_give_their_order_and_allow_indices(classify, tmp_path):
    rows = [{**row, "label": int(row["label"] == "animal")} for row in reviews(80, 0)]
    data = write_rows(tmp_path / "train.jsonl", rows)
    result, _ = run(classify(data, labels=("place", "animal"), epochs=1))
    content = json.loads((result.model / "config.json").read_text(encoding="utf-8"))
    assert content["id2label"] == {"0": "place", "1": "animal"}
    assert content["label2id"] == {"place": 0, "animal": 1}


def test_a_head_with_the_same_labels_is_taken_over_and_another_one_is_new(
    trained, classify, data, tmp_path
):
    first = trained[0]
    frozen = {"model": first.model, "learning_rate": 1e-12, "epochs": 1}
    again, _ = run(classify(data, output=tmp_path / "again", **frozen))
    assert again.figures["test"]["accuracy"] == first.figures["test"]["accuracy"]
    rows = [{**row, "label": row["label"] + "s"} for row in reviews(40, 0)]
    other = write_rows(tmp_path / "other.csv", rows)
    with pytest.warns(UserWarning, match=r"newly initialized: classifier\.weight, classifier\.b"):
        run(classify(other, output=tmp_path / "new", **frozen))


def test_long_texts_are_cut_as_in_the_training(classify, tmp_path):
    rows = [{"text": " ".join(["old"] * 60), "label": label} for label in ("a", "b")] * 4
    data = write_rows(tmp_path / "train.csv", rows)
    result, text = run(classify(data, epochs=1, max_length=12))
    assert "8 texts were cut to 12 tokens" in text
    assert predict(result.model, data, tmp_path / "said.jsonl").max_length == 12


def test_a_frozen_encoder_keeps_its_weights(classify, data, pretrained):
    result, text = run(classify(data, freeze=True, epochs=1))
    before = BertForSequenceClassification.from_pretrained(pretrained)
    after = BertForSequenceClassification.from_pretrained(result.model)
    old, new = before.state_dict(), after.state_dict()
    changed = {name for name in new if not torch.equal(old[name], new[name])}
    head = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert changed == {*head, "classifier.weight", "classifier.bias"}
    assert f"{32 * 32 + 32 + 2 * 32 + 2:,} trained parameters" in text


def test_a_frozen_encoder_has_no_dropout(classify, data, monkeypatch):
    modes = set()
    original = FinetuningRun.update

    def update(self, features):
        modes.add((self.model.dropout.training, self.model.bert.training))
        modes.add((True, self.model.bert.encoder.training))
        return original(self, features)

    monkeypatch.setattr(FinetuningRun, "update", update)
    # The evaluation after the first epoch must not change the model's mode in the second epoch.
    run(classify(data, freeze=True, epochs=2))
    assert modes == {(True, False)}
