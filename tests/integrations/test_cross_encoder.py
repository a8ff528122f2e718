"""An accelerated ``CrossEncoder`` gives the scores and the ranks of stock."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tiny_sentence_models as tiny
import torch
from quick_cases import long_case
from tiny_models import rows_computed
from torch import Tensor, nn

import fastbert
from fastbert.integrations import accelerate as accelerated
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import run_sides

pytest.importorskip("sentence_transformers", minversion="6")
from sentence_transformers import CrossEncoder

FAMILIES = ("Bert", "XLMRoberta", *map(long_case, ("DistilBert", "MPNet", "ModernBert", "Electra")))
QUERY = "w1 w2 w3 w4"
DOCUMENTS = [
    "w2 w3",
    "",
    " ".join(f"w{i}" for i in range(40, 70)),
    *(" ".join(random.Random(i).choices(tiny.WORDS[5:], k=1 + 3 * i % 17)) for i in range(14)),
]
# Queries of 1 to 6 words with documents of 0 to 30 words.
PAIRS = [(" ".join(f"w{j}" for j in range(1 + i % 6)), text) for i, text in enumerate(DOCUMENTS)]
CLASSIFIER = ["0.model.classifier"]
ACTIVATIONS = {
    "default": None,
    "identity": nn.Identity(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "softmax": nn.Softmax(dim=-1),
}


def build(folder: Path, family: str = "Bert", labels: int = 1, **options: Any) -> Any:
    """Return a stock model whose classification head has random weights."""
    if not (folder / "config.json").exists():
        settings = tiny.config(family, num_labels=labels)
        tiny.save(folder, f"{family}ForSequenceClassification", settings)
    given = {"attn_implementation": "eager"}
    return CrossEncoder(str(folder), device="cpu", model_kwargs=given, **options).eval()


def predict(model: Any, pairs: Any = PAIRS, **options: Any) -> Tensor:
    return model.predict(pairs, batch_size=8, convert_to_tensor=True, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_agree_with_stock(tmp_path, family, labels, dtype):
    sides = tiny.sides(build(tmp_path, family, labels), dtype)
    with rows_computed() as rows:
        scores = predict(sides[0])
    assert scores.shape == ((len(PAIRS),) if labels == 1 else (len(PAIRS), 3))
    given = [sides[0].preprocess([pair])["input_ids"].numel() for pair in PAIRS]
    assert sum(rows) in (sum(given), 2 * sum(given)), "padding is computed"

    def logits(model: Any) -> Tensor:
        return predict(model, activation_fn=nn.Identity())

    assert_close("logits", *run_sides(logits, *sides))
    assert_close("scores", *run_sides(predict, *sides))


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_functions(tmp_path, labels, activation):
    sides = tiny.sides(build(tmp_path, labels=labels, activation_fn=ACTIVATIONS[activation]))
    assert_close(activation, *run_sides(predict, *sides))
    given = {"activation_fn": nn.Softplus(), "apply_softmax": True}
    assert_close("in the call", *run_sides(lambda model: predict(model, **given), *sides))


def test_kinds_of_results(tmp_path):
    fast, _, stock = tiny.sides(build(tmp_path))
    for options in ({}, {"convert_to_numpy": False}, {"convert_to_tensor": True}):
        actual, expected = (model.predict(PAIRS, **options) for model in (fast, stock))
        assert type(actual) is type(expected)
        assert type(actual[0]) is type(expected[0])
    one = fast.predict(PAIRS[2])
    assert one == pytest.approx(stock.predict(PAIRS[2]), abs=1e-5)
    assert one == pytest.approx(fast.predict(PAIRS)[2], abs=1e-6)


@pytest.mark.parametrize("top", [None, 4])
def test_ranks_agree_with_stock(tmp_path, top):
    fast, _, stock = tiny.sides(build(tmp_path))
    options = {"top_k": top, "return_documents": True}
    actual, expected = (model.rank(QUERY, DOCUMENTS, **options) for model in (fast, stock))
    assert len(actual) == (top or len(DOCUMENTS))
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours["corpus_id"] == theirs["corpus_id"]
        assert ours["text"] == theirs["text"]
        assert ours["score"] == pytest.approx(theirs["score"], abs=1e-5)


def test_prompts(tmp_path):
    options = {"prompts": {"query": "w7 w8 "}, "default_prompt_name": "query"}
    sides = tiny.sides(build(tmp_path, **options))
    results = run_sides(predict, *sides)
    assert_close("default prompt", *results)
    other = run_sides(lambda model: predict(model, prompt="w9 "), *sides)
    assert_close("another prompt", *other)
    assert not torch.equal(results[0], other[0])


def test_pairs_are_cut_at_the_length_of_the_model(tmp_path):
    sides = tiny.sides(build(tmp_path, max_length=12))
    with rows_computed() as rows:
        predict(sides[0])
    assert max(rows) <= 8 * 12
    assert_close("scores", *run_sides(predict, *sides))


@pytest.mark.parametrize("names", [CLASSIFIER, [*CLASSIFIER, "0.model.bert.pooler.dense"]])
def test_a_layer_that_is_kept_in_fp32(tmp_path, names):
    """sentence-transformers computes the selected linear layers in fp32 also under bf16."""
    fast, oracle, stock = tiny.sides(build(tmp_path), torch.bfloat16)
    for model in (fast, stock):
        model.set_keep_in_fp32_modules(names)
    with rows_computed() as rows:
        assert_close("scores", *run_sides(predict, fast, oracle, stock))
    assert rows


def test_a_layer_in_the_encoder_that_is_kept_in_fp32(tmp_path):
    """fastbert calls the layer, because its class is not that of the stock encoder."""
    fast, oracle, stock = tiny.sides(build(tmp_path))
    for model in (fast, oracle, stock):
        if model is not oracle:
            model.set_keep_in_fp32_modules(["0.model.bert.encoder.layer.1.intermediate.dense"])
    with rows_computed() as rows:
        assert_close("scores", *run_sides(predict, fast, oracle, stock))
    assert rows
    assert accelerated.obstacles(fast) == {"0.model.bert": None}


def test_saved_opened_again_and_restored(tmp_path):
    model = fastbert.accelerate(build(tmp_path / "model", labels=3))
    scores = predict(model)
    model.save_pretrained(str(tmp_path / "saved"))
    stock = CrossEncoder(str(tmp_path / "saved"), device="cpu")
    torch.testing.assert_close(predict(stock), scores, rtol=1e-4, atol=1e-5)
    assert torch.equal(predict(fastbert.accelerate(stock)), scores)
    fastbert.restore(model)
    assert accelerated.bound_encoders(model) == {}
    assert torch.equal(predict(model), predict(build(tmp_path / "model")))
