"""The caller can request hidden states of chosen layers by their numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers_pair import as_float64, batch, pair

from fastbert import modules
from fastbert.ops.backend import EXTENSION, EXTENSION_STATE
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick, each

LAYERS = 4
CHOICES = ([0], [LAYERS], [2, -1], [-LAYERS - 1, 3, 3], (1, 2), range(1, 4))


def model(**changes: Any) -> modules.BertModel:
    return pair("BertModel", num_hidden_layers=LAYERS, **changes).ours


@pytest.mark.parametrize("path", ["one call", "layer by layer", "gradients"])
def test_they_are_those_among_all_states(path: str) -> None:
    built = model()
    if path == "layer by layer":
        built.set_backend("reference")
    rows = {name: value.flatten() for name, value in batch().items()}
    ends = torch.tensor([0, 19, 40, 76], dtype=torch.int32)
    with torch.set_grad_enabled(path == "gradients"):
        for inputs in (batch(padded=True), {**rows, "cu_seqlens": ends}):
            everything = built(**inputs, output_hidden_states=True)
            for chosen in CHOICES:
                got = built(**inputs, output_hidden_states=chosen)
                kept = {number % (LAYERS + 1) for number in chosen}
                assert {i for i, state in enumerate(got.hidden_states) if state is not None} == kept
                assert len(got.hidden_states) == LAYERS + 1
                for number in kept:
                    assert torch.equal(got.hidden_states[number], everything.hidden_states[number])
                assert torch.equal(got.last_hidden_state, everything.last_hidden_state)
                assert torch.equal(got.pooler_output, everything.pooler_output)


def test_they_agree_with_transformers() -> None:
    models = pair("BertModel", num_hidden_layers=LAYERS)
    inputs = batch(padded=True)
    mask = inputs["attention_mask"].bool()
    double = {name: as_float64(value) for name, value in inputs.items()}
    with torch.inference_mode():
        ours = models.ours(**inputs, output_hidden_states=[-1, 1]).hidden_states
        stock = models.oracle(**double, output_hidden_states=True).hidden_states
        yardstick = Yardstick(
            lambda: models.yardstick(**inputs, output_hidden_states=True).hidden_states
        )
        for number in (1, LAYERS):
            sides = each(lambda states, n=number: states[n][mask], ours, stock, yardstick)
            assert_close(f"state {number}", *sides)


@pytest.mark.skipif(EXTENSION is None, reason=EXTENSION_STATE)
def test_the_layers_run_as_one_call(monkeypatch) -> None:
    built, calls = model(), []
    one_call = modules.executors.ops.encoder

    def counted(*arguments: Any, **options: Any) -> list[Tensor]:
        calls.append(options["all_states"])
        return one_call(*arguments, **options)

    monkeypatch.setattr(modules.executors.ops, "encoder", counted)
    with torch.inference_mode():
        for chosen in ([1, -1], [0, -1], [], False):
            built(**batch(), output_hidden_states=chosen)
    assert calls == [True, False, False, False]


def test_every_model_takes_them() -> None:
    built = pair("BertForSequenceClassification").ours
    states = built(**batch(), output_hidden_states=[1], return_dict=False)[1]
    assert [state is None for state in states] == [True, False, True]
    assert built(**batch(), output_hidden_states=[]).hidden_states is None


def test_gradients_pass_through_them() -> None:
    built = model()
    out = built(**batch(), output_hidden_states=[1, 3])
    loss = out.last_hidden_state.square().sum()
    for slope in torch.autograd.grad(loss, [out.hidden_states[1], out.hidden_states[3]]):
        assert slope.any()


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_errors(name: str) -> None:
    built, count = model(), LAYERS + (name == "output_hidden_states")
    allowed = f"allowed: True, False or numbers from {-count} to {count - 1}"
    for wrong in (count, -count - 1, True, "1", 1.0):
        with pytest.raises(ValueError, match=f"{name}: got layer {wrong!r}, {allowed}"):
            built(**batch(), **{name: [0, wrong]})
    for wrong in (2, torch.tensor([1]), {1}):
        with pytest.raises(TypeError, match=rf"^{name}: got .*, {allowed}"):
            built(**batch(), **{name: wrong})
