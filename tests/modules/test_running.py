"""Models run with dropout, checkpointing, 16-bit dtypes, other backends, and torch.compile."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from quick_cases import long_case
from torch import Tensor
from transformers_pair import BATCH, LENGTH, SIZES, batch, gradients, pair

from fastbert import modules
from fastbert.config import BertConfig
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick, each

DROPPING = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}


def pretraining_batch() -> dict[str, Tensor]:
    inputs = batch(padded=True)
    labels = torch.randint(0, 211, (BATCH, LENGTH), generator=torch.Generator().manual_seed(4))
    return {**inputs, "labels": labels, "next_sentence_label": torch.tensor([0, 1, 0, 1])}


def step(model: torch.nn.Module, seed: int = 0, **options: Any) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(**pretraining_batch(), **options).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: g.clone() for n, g in gradients(model).items()}}


def model(**overrides: Any) -> modules.BertForPreTraining:
    return pair("BertForPreTraining", **overrides).ours.train()


def test_dropout_differs_per_call_and_repeats_from_a_seed() -> None:
    dropping = model(**DROPPING)
    first, again, other = step(dropping), step(dropping), step(dropping, seed=1)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
    assert not torch.equal(first["loss"], other["loss"])
    dropping.eval()
    assert torch.equal(step(dropping)["loss"], step(dropping, seed=1)["loss"])


@pytest.mark.parametrize("layer", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_each_dropout_is_applied(layer: str) -> None:
    dropping = model(**{layer: 0.5})
    assert not torch.equal(step(dropping)["loss"], step(dropping, seed=1)["loss"])


def test_dropout_of_everything() -> None:
    dropped = model(hidden_dropout_prob=1.0, attention_probs_dropout_prob=1.0)
    assert all(tensor.isfinite().all() for tensor in step(dropped).values())


def test_checkpointing_changes_no_gradient() -> None:
    dropping = model(**DROPPING)
    plain = step(dropping)
    dropping.gradient_checkpointing_enable()
    recomputed = step(dropping)
    for name, tensor in plain.items():
        assert torch.equal(tensor, recomputed[name]), name
    calls = []
    layer = dropping.bert.encoder.layer[0]
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    step(dropping)
    assert len(calls) == 2
    dropping.gradient_checkpointing_disable()
    step(dropping)
    assert len(calls) == 3


def test_checkpointing_keeps_states_and_weights() -> None:
    plain = model()
    expected = plain(**batch(padded=True), output_hidden_states=True, output_attentions=True)
    plain.gradient_checkpointing_enable()
    got = plain(**batch(padded=True), output_hidden_states=True, output_attentions=True)
    for name in ("hidden_states", "attentions"):
        for ours, stock in zip(got[name], expected[name], strict=True):
            assert torch.equal(ours, stock)


def test_bfloat16_against_transformers() -> None:
    models = pair("BertForPreTraining")
    inputs = batch(padded=True)
    mask = inputs["attention_mask"].bool()
    ours, single = models.ours.bfloat16(), models.yardstick.bfloat16()
    oracle = copy.deepcopy(single).double()
    yardstick = Yardstick(lambda: single(**inputs, output_hidden_states=True))
    outs = *(m(**inputs, output_hidden_states=True) for m in (ours, oracle)), yardstick
    assert_close("nsp", *each(lambda out: out.seq_relationship_logits, *outs))
    assert_close("mlm", *each(lambda out: out.prediction_logits[mask], *outs))
    assert_close("states", *each(lambda out: torch.stack(out.hidden_states)[:, mask], *outs))
    trained = step(ours.train())
    assert trained["loss"].dtype == torch.float32
    assert all(tensor.isfinite().all() for tensor in trained.values())
    assert {p.grad.dtype for p in ours.parameters()} == {torch.bfloat16}


def test_autocast_keeps_the_residual_stream_in_float32() -> None:
    models = pair("BertForPreTraining")
    inputs = batch(padded=True)
    mask = inputs["attention_mask"].bool()

    def under_autocast(model: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**inputs, output_hidden_states=True)

    ours, single = under_autocast(models.ours), Yardstick(lambda: under_autocast(models.yardstick))
    oracle = models.oracle(**inputs, output_hidden_states=True)
    assert ours.prediction_logits.dtype == torch.bfloat16
    outs = each(lambda out: out.hidden_states, ours, oracle, single)
    for i, states in enumerate(zip(*outs, strict=True)):
        assert_close(f"hidden_states[{i}]", *each(lambda state: state[mask], *states))
    models.ours.train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = models.ours(**pretraining_batch()).loss
    loss.backward()
    assert loss.dtype == torch.float32
    for name, parameter in models.ours.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name


def test_set_backend_reaches_every_operation() -> None:
    built = modules.BertForPreTraining(BertConfig(**SIZES), backend="reference")
    assert {choice.backend for choice in built.backends().values()} == {"reference"}
    assert built.bert.backend == built.backend == "reference"
    built.set_backend(None)
    assert "asked for" not in {choice.reason for choice in built.backends().values()}
    built.set_backend("triton")
    choices = built.backends()
    for op in ("attention", "embedding", "layer_norm"):
        assert choices[op] == ("triton", "asked for")
    assert "feed_forward" in choices
    assert choices.keys() >= {"linear_cross_entropy", "linear_gelu"}


def test_backends_agree_on_the_dropout_mask() -> None:
    dropping = model(**DROPPING).double()
    dropping.set_backend("reference")
    exact = step(dropping)
    single = model(**DROPPING)
    single.set_backend("reference")
    yardstick = Yardstick(lambda: step(single))
    fast = model(**DROPPING)
    fast.set_backend(None)
    assert_close("loss", step(fast)["loss"], exact["loss"], yardstick["loss"])


@pytest.mark.parametrize("masked", [long_case(False), True])
def test_compiles_without_a_graph_break(masked: bool) -> None:
    plain = model()
    inputs = pretraining_batch()
    if not masked:
        inputs.pop("attention_mask")
    expected = plain(**inputs).loss
    expected.backward()
    gradient = gradients(plain)
    plain.zero_grad()
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    loss = compiled(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, tensor in gradients(plain).items():
        torch.testing.assert_close(tensor, gradient[name])
