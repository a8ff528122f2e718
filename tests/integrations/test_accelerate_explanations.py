"""Gradients for the hidden states and attention weights of an accelerated encoder are right.

Explanations of predictions use such gradients. The stock model in float64 has the exact results.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from stock_families import (
    FAMILIES,
    PADDINGS,
    REASON,
    assert_gradients_close,
    build,
    call,
    gradients,
    in_dtype,
    inputs,
    of_each_kind,
    total,
)
from stock_families import Outputs as Stacked

import fastbert
import fastbert.integrations.attention_interface  # registers the name "fastbert"
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import run_sides

# With this filter, a test fails if the accelerated model runs stock code.
pytestmark = [
    pytest.mark.filterwarnings("error:.*runs its own code"),
    pytest.mark.each_value,
]

every_family = pytest.mark.parametrize("family", of_each_kind(FAMILIES))
BOTH = {"output_hidden_states": True, "output_attentions": True}


def sides_of(model: Any) -> tuple[Any, Any, Any]:
    """Return the accelerated model, the stock model in float64, and the stock model itself."""
    return fastbert.accelerate(copy.deepcopy(model)), in_dtype(model, torch.float64), model


def loss_of(out: Any, real: Tensor) -> Tensor:
    """Return a loss of the last hidden states of real tokens and of the pooled rows."""
    pooled = getattr(out, "pooler_output", None)
    pooled = None if pooled is None else pooled[real[:, 0]]
    return total(Stacked(out.last_hidden_state[real], None, pooled))


def slopes_of(side: nn.Module, batch: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Return the gradients of the loss for all hidden states and attention weights.

    The states have the shape ``(N + 1, B, L, H)``, the weights the shape ``(N, B, heads, L, L)``.
    """
    real = batch["attention_mask"].bool()
    out = call(side, batch, **BOTH, **options)
    asked = (*out.hidden_states, *out.attentions)
    slopes = torch.autograd.grad(loss_of(out, real), asked)
    states = len(out.hidden_states)
    return {"states": torch.stack(slopes[:states]), "weights": torch.stack(slopes[states:])}


def assert_slopes_close(batch: dict[str, Tensor], sides: list[dict[str, Tensor]]) -> None:
    real = batch["attention_mask"].bool()
    pairs = real[:, None, :, None] & real[:, None, None, :]
    assert not sides[0]["states"][:, ~real].any()
    assert not (sides[0]["weights"] * ~pairs).any()
    states = (side["states"][:, real] for side in sides)
    assert_close("gradient of the states", *states, factor=3.0, reason=REASON)
    shape = sides[0]["weights"].shape
    weights = (side["weights"][pairs.expand(shape)] for side in sides)
    assert_close("gradient of the weights", *weights, factor=3.0, reason=REASON)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", PADDINGS)
@every_family
def test_gradients_reach_states_and_weights_as_in_transformers(family, padding, dtype) -> None:
    model, batch = in_dtype(build(family), dtype), inputs(padding, family, rows=8)
    assert_slopes_close(batch, [slopes_of(side, batch) for side in sides_of(model)])


@pytest.mark.parametrize("padding", ["right", "middle"])
@every_family
def test_parameters_have_the_same_gradients_through_states_and_weights(family, padding) -> None:
    model, batch = build(family), inputs(padding, family, rows=8)
    real = batch["attention_mask"].bool()

    def slopes(side: nn.Module) -> dict[str, Tensor]:
        side.zero_grad()
        out = call(side.train(), batch, **BOTH)
        weights = torch.stack(out.attentions).transpose(2, 3)[:, real]
        seen = Stacked(torch.stack(out.hidden_states)[:, real], None, weights)
        (total(seen) + loss_of(out, real)).backward()
        return gradients(side)

    assert_gradients_close(*run_sides(slopes, *sides_of(model)))


@every_family
def test_a_retained_gradient_is_that_of_the_first_state(family) -> None:
    fast = fastbert.accelerate(build(family))
    out = fast(**inputs("right", family), **BOTH)
    kept = (*out.hidden_states, *out.attentions)
    for tensor in kept:
        tensor.retain_grad()
    out.last_hidden_state.flatten()[0].backward()
    assert out.hidden_states[-1] is out.last_hidden_state
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in kept)


@every_family
def test_states_of_packed_sequences_carry_gradients(family) -> None:
    fast, ids = fastbert.accelerate(build(family)), inputs("none", family, rows=1)["input_ids"]
    ends = torch.tensor([0, 4, 5, 14, 21], dtype=torch.int32)
    out = fast(ids, cu_seq_lens_q=ends, max_length_q=9, **BOTH)
    asked = (*out.hidden_states, *out.attentions)
    slopes = torch.autograd.grad(out.last_hidden_state[0, 4].sum(), asked)
    for state, slope in zip(out.hidden_states, slopes, strict=False):
        assert state.shape == (1, 21, 144)
        reached = slope[0].any(-1)
        assert reached[4]
        assert not reached[torch.arange(21) != 4].any(), "the second sequence is one token"
    for slope in slopes[len(out.hidden_states) :]:
        assert not slope[[0, 2, 3]].any()


@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert"])
def test_checkpointing_gives_the_same_gradients(family) -> None:
    batch = inputs("right", family)
    fast = fastbert.accelerate(build(family)).train()
    plain = slopes_of(fast, batch)
    fast.activation_checkpointing_enable()
    checkpointed = slopes_of(fast, batch)
    assert all(torch.equal(checkpointed[name], slope) for name, slope in plain.items())


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_weights_of_one_layer_carry_the_gradient_of_that_layer(family) -> None:
    batch = inputs("right", family)
    real = batch["attention_mask"].bool()
    fast, *stock = sides_of(build(family))
    out = fast(**batch, output_attentions=[1])
    (slope,) = torch.autograd.grad(loss_of(out, real), out.attentions[1])
    pairs = (real[:, None, :, None] & real[:, None, None, :]).expand(slope.shape)
    sides = [slope, *(slopes_of(side, batch)["weights"][1] for side in stock)]
    assert_close("gradient", *(side[pairs] for side in sides), factor=3.0, reason=REASON)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@every_family
def test_values_do_not_change_where_no_gradient_is_wanted(family, mode) -> None:
    """A frozen model gives the bits of a call in ``no_grad`` or ``inference_mode``."""
    fast, batch = fastbert.accelerate(build(family)), inputs("middle", family)
    with getattr(torch, mode)():
        expected = fast(**batch, **BOTH)
    frozen = fast.requires_grad_(False)(**batch, **BOTH)
    for name in ("hidden_states", "attentions"):
        for one, other in zip(frozen[name], expected[name], strict=True):
            assert torch.equal(one, other)
            assert not one.requires_grad


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_the_same_weights_are_dropped_with_and_without_the_weights(family) -> None:
    """Dropout drops the same attention weights whether or not the model returns them."""
    drops = "attention_dropout" if family == "modernbert" else "attention_probs_dropout_prob"
    model, batch = build(family, **{drops: 0.5}), inputs("right", family)
    double, single = (
        fastbert.accelerate(in_dtype(model, dtype)).train()
        for dtype in (torch.float64, torch.float32)
    )
    outs = []
    for side, weights in ((single, True), (double, False), (single, False)):
        torch.manual_seed(7)
        out = side(**batch, output_attentions=weights)
        outs.append(out.last_hidden_state[batch["attention_mask"].bool()])
    assert_close("last_hidden_state", *outs)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mpnet"])
def test_the_attention_interface_carries_gradients_as_well(family) -> None:
    batch = inputs("none", family)
    ours, *stock = sides_of(build(family))
    fastbert.restore(ours).set_attn_implementation("fastbert")
    assert_slopes_close(batch, [slopes_of(side, batch) for side in (ours, *stock)])


# The tuple

HEADS = (
    "Model",
    "ForMaskedLM",
    "ForPreTraining",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)


def shapes(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(shapes(each) for each in value)
    return None if value is None else tuple(value.shape)


def flat(values: tuple[Any, ...]) -> list[Tensor]:
    return [each for part in values for each in (part if isinstance(part, tuple) else (part,))]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("states", [False, True])
@every_family
def test_the_tuple_has_the_order_of_transformers(family, states, weights) -> None:
    import transformers

    asked = {"output_hidden_states": states, "output_attentions": weights, "return_dict": False}
    batch = inputs("none", family)
    for head in HEADS:
        if not hasattr(transformers, FAMILIES[family].name + head):
            continue
        with torch.no_grad():
            sides = [call(side, batch, **asked) for side in sides_of(build(family, head))]
        assert shapes(sides[0]) == shapes(sides[2]), head
        for parts in zip(*map(flat, sides), strict=True):
            assert_close(head, *parts)
