"""With weights of labels, the loss equals torch's in a batch, micro-batches and evaluations."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from finetuning_problems import reviews, run, write_rows
from sklearn.utils.class_weight import compute_class_weight

from fastbert.finetuning import ClassifyOptions, TagOptions, evaluate
from fastbert.finetuning.class_weights import ClassWeights, parse_class_weights
from fastbert.finetuning.finetuning_run import FinetuningRun
from fastbert.finetuning.model import Source
from fastbert.finetuning.preparation import encode, read_parts
from fastbert.training.log import read_log


def uneven(count: int, seed: int, share: int = 4) -> list[dict]:
    """Return texts in which one of the two labels is rare."""
    rows = reviews(count, seed)
    return [row for i, row in enumerate(rows) if row["label"] == "animal" or i % share == 0]


def tagged(rows: list[dict]) -> list[dict]:
    lines = []
    for row in rows:
        words = row["text"].split()
        lines.append({"tokens": words, "tags": [row["label"], *["other"] * (len(words) - 1)]})
    return lines


@pytest.fixture
def prepared(pretrained, tmp_path):
    """Return a function that makes the task, the sequences and the model from options."""

    def make(kind, rows, **options):
        data = write_rows(tmp_path / "train.jsonl", rows)
        options = {"held_out": 0.0, **options}
        chosen = kind(model=pretrained, data=data, output=tmp_path / "out", **options)
        task, source = chosen.task(), Source(pretrained)
        examples = read_parts(task, chosen, lambda text: None)["train"]
        features = encode(task, examples, source.tokenizer(None))
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match="newly initialized"):
            return task, features, source.build(task, None).eval()

    return make


def labels_of(task, features):
    batch = task.collate(features)
    return batch, batch["labels"]


CASES = {
    "classify": (ClassifyOptions, uneven, {"animal": 0.5, "place": 3.0}),
    "tag": (TagOptions, lambda n, seed: tagged(uneven(n, seed)), {"animal": 4.0, "place": 0.25}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("balanced", [False, True])
def test_the_loss_and_its_gradient_are_those_of_torch(prepared, name, balanced):
    kind, rows, weights = CASES[name]
    given = "balanced" if balanced else weights
    task, features, model = prepared(kind, rows(60, 0), class_weights=given)
    batch, labels = labels_of(task, features)
    names = task.labels.names
    if balanced:
        known = labels[labels >= 0].numpy()
        expected = compute_class_weight("balanced", classes=np.arange(len(names)), y=known)
    else:
        # A label without an explicit weight has the weight 1, as in scikit-learn.
        expected = [weights.get(name, 1.0) for name in names]
    expected = torch.tensor(expected, dtype=torch.float32)
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
    truth = F.cross_entropy(logits, labels, weight=expected, ignore_index=-100)
    truth.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    weighted_loss = task.output(model, batch).loss
    torch.testing.assert_close(weighted_loss, truth)
    # Micro-batches that differ in size and in label counts accumulate the same gradient.
    whole = task.labels_in(features)
    assert whole == pytest.approx(float(expected[labels[labels >= 0]].sum()), rel=1e-6)
    order = sorted(range(len(features)), key=lambda i: str(features[i]["labels"]))
    for part in (order[:7], order[7:20], order[20:21], order[21:]):
        chosen = [features[i] for i in part]
        loss = task.output(model, task.collate(chosen)).loss
        (loss * (task.labels_in(chosen) / whole)).backward()
    actual = [p.grad for p in model.parameters() if p.grad is not None]
    for ours, stock in zip(actual, gradients, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-6)
    # An evaluation that divides the sequences into several batches gives the same loss.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "TOKENS_PER_BATCH", 40)
        outputs = evaluate.compute(model, task, features)
    assert outputs.loss == pytest.approx(truth.item(), rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_have_the_gradient_of_one(prepared, name):
    kind, rows, weights = CASES[name]
    weights = {name: weight / 1000 for name, weight in weights.items()}
    task, features, model = prepared(
        kind, rows(30, 1), class_weights=weights | {"other": 1e-3} if name == "tag" else weights
    )
    whole, _ = labels_of(task, features)
    task.output(model, whole).loss.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    for index in range(2):
        accelerator = SimpleNamespace(
            num_processes=2, process_index=index, reduce=lambda loss, how: loss
        )
        own = FinetuningRun.__new__(FinetuningRun)
        own.accelerator, own.judging = accelerator, task
        # DDP averages the gradients, so each process contributes half of its gradient.
        loss = own.share(features, task.output(model, task.collate(features[index::2])).loss)
        (loss / 2).backward()
    actual = [p.grad for p in model.parameters() if p.grad is not None]
    for ours, stock in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_with_weights_learns_and_says_them(classify, tmp_path, precision):
    data = write_rows(tmp_path / "train.csv", uneven(200, 0))
    options = {"class_weights": "balanced", "precision": precision, "epochs": 5}
    result, text = run(classify(data, **options))
    assert "class weights: animal 0.6" in text
    assert result.figures["validation"]["accuracy"] >= 0.9
    rows = [row for row in read_log(result.log) if row["event"] == "evaluation"]
    kept = next(row for row in rows if row["step"] == result.kept["step"])
    assert kept["loss"] == pytest.approx(result.figures["validation"]["loss"])
    content = json.loads(result.metrics.read_text(encoding="utf-8"))
    assert content["options"]["class_weights"] == "balanced"


def test_weights_of_one_change_nothing(classify, tmp_path):
    data = write_rows(tmp_path / "train.csv", uneven(80, 0))
    plain, _ = run(classify(data, output=tmp_path / "plain", epochs=1))
    ones = {"animal": 1.0, "place": 1.0}
    weighed, _ = run(classify(data, output=tmp_path / "ones", epochs=1, class_weights=ones))
    assert plain.figures["train"]["loss"] == pytest.approx(
        weighed.figures["train"]["loss"], rel=1e-4
    )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("even", "class_weights: got 'even', allowed: None, 'balanced', or a finite number > 0"),
        ({}, "class_weights: got {}, allowed: None"),
        ({"animal": 0}, "class_weights: got {'animal': 0}, allowed: None"),
        ({"animal": float("inf")}, "class_weights: got {'animal': inf}, allowed: None"),
    ],
)
def test_a_wrong_weight_is_named(classify, weights, message):
    with pytest.raises(ValueError) as failure:
        classify("data", class_weights=weights)
    assert message in str(failure.value)


def test_weights_that_do_not_fit_the_labels_are_refused(classify, tmp_path):
    data = write_rows(tmp_path / "train.csv", uneven(20, 0))
    with pytest.raises(ValueError, match="class_weights: got 'plant', allowed: weights of the lab"):
        run(classify(data, class_weights={"plant": 2.0}))
    labels = ("animal", "place", "plant")
    with pytest.raises(ValueError, match=r"'balanced', allowed: weights by name, because .* plant"):
        run(classify(data, labels=labels, class_weights="balanced"))
    with pytest.raises(ValueError, match="class_weights and regression: got"):
        classify(data, regression=True, class_weights="balanced")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        (None, None),
        ("balanced", "balanced"),
        ("no=1,yes=4.5", {"no": 1.0, "yes": 4.5}),
        ("a=b=2, c =3", {"a=b": 2.0, "c": 3.0}),
    ],
)
def test_weights_of_the_command_line(text, weights):
    assert parse_class_weights(text) == weights


@pytest.mark.parametrize("text", ["even", "no", "no=x", "=1", "no=1,no=2", "no=0", ""])
def test_a_wrong_weight_of_the_command_line_is_named(text):
    with pytest.raises(ValueError, match=r"^class_weights: got .*, allowed: 'balanced', or NAME="):
        parse_class_weights(text)


def test_a_negative_label_does_not_count():
    weights = ClassWeights({"a": 2.0, "b": 1.0})
    weights.learn(["a", "b"], [])
    logits = torch.tensor([[0.1, 0.7], [0.3, 0.2], [5.0, -5.0]])
    model = lambda: SimpleNamespace(logits=logits)  # noqa: E731
    loss = weights.output(model, {"labels": torch.tensor([0, 1, -100])}).loss
    expected = F.cross_entropy(logits[:2], torch.tensor([0, 1]), torch.tensor([2.0, 1.0]))
    torch.testing.assert_close(loss, expected)
