"""Losses of the hidden states and attention weights that models return have right gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers_pair import BATCH, LENGTH, REASON, Pair, as_float64, batch, pair

from fastbert import ops
from fastbert.modules import attention
from fastbert.modules.batch_layout import BatchLayout
from fastbert.ops.attention_context import attention_context
from fastbert.ops.varlen import unpad_indices
from fastbert.testing.compare import assert_close

BOTH = {"output_hidden_states": True, "output_attentions": True}
HEADS = {
    "BertForPreTraining": "prediction_logits",
    "BertForMaskedLM": "logits",
    "BertForNextSentencePrediction": "logits",
    "BertForSequenceClassification": "logits",
    "BertForTokenClassification": "logits",
    "BertForQuestionAnswering": "start_logits",
}


def asked(out: Any) -> tuple[Tensor, ...]:
    return (*out.hidden_states, *out.attentions)


def slopes(side: Any, inputs: dict[str, Tensor], real: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss's gradients for all states (N + 1, B, L, H) and weights (N, B, heads, L, L)."""
    out = side(**inputs, **BOTH)
    factors = torch.randn(out.last_hidden_state.shape, generator=torch.Generator().manual_seed(3))
    loss = (out.last_hidden_state * factors.to(out.last_hidden_state.dtype))[real].sum()
    grads = torch.autograd.grad(loss + out.pooler_output.sum(), asked(out))
    states = len(out.hidden_states)
    return torch.stack(grads[:states]), torch.stack(grads[states:])


def pairs_of_tokens(real: Tensor, like: Tensor) -> Tensor:
    return (real[:, None, :, None] & real[:, None, None, :]).expand(like.shape)


@pytest.mark.parametrize("mask", ["none", "two dims", "four dims"])
def test_they_are_those_of_transformers(mask: str) -> None:
    models: Pair = pair("BertModel")
    inputs = batch(padded=mask == "two dims")
    real = inputs.get("attention_mask", torch.ones(BATCH, LENGTH)).bool()
    if mask == "four dims":
        seen = (
            torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(4)) < 0.6
        )
        hidden = ~(seen | torch.eye(LENGTH, dtype=torch.bool))
        inputs["attention_mask"] = torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)
    double = {name: as_float64(value) for name, value in inputs.items()}
    sides = (models.ours, inputs), (models.oracle, double), (models.yardstick, inputs)
    states, weights = zip(*(slopes(side, given, real) for side, given in sides), strict=True)
    kept = pairs_of_tokens(real, weights[0])
    assert not states[0][:, ~real].any()
    assert not weights[0][~kept].any()
    assert_close("states", *(x[:, real] for x in states), factor=3.0, reason=REASON)
    assert_close("weights", *(x[kept] for x in weights), factor=3.0, reason=REASON)


@pytest.mark.parametrize("head", HEADS)
def test_they_reach_every_head(head: str) -> None:
    out = pair(head).ours(**batch(padded=True), **BOTH)
    for slope in torch.autograd.grad(out[HEADS[head]][0].square().sum(), asked(out)):
        assert slope.any()
        assert slope.isfinite().all()


def test_they_are_there_for_packed_sequences() -> None:
    inputs, ends = batch(), torch.tensor([0, 19, 19, 50, 76], dtype=torch.int32)
    rows = {name: value.flatten() for name, value in inputs.items()}
    out = pair("BertModel").ours(**rows, cu_seqlens=ends, max_seqlen=31, **BOTH)
    grads = torch.autograd.grad(out.last_hidden_state[20].sum(), asked(out))
    reached = torch.arange(76)
    for state, slope in zip(out.hidden_states[:-1], grads, strict=False):
        assert slope.shape == state.shape == (76, 48)
        assert torch.equal(slope.any(-1), (reached >= 19) & (reached < 50))
    for slope in grads[len(out.hidden_states) :]:
        assert slope[2].any()
        assert not slope[[0, 1, 3]].any()


def test_what_nobody_attends_is_not_seen_where_weights_carry_gradients() -> None:
    models = pair("BertModel")
    embeds = models.ours.get_input_embeddings()(batch()["input_ids"]).detach()
    mask = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    mask[..., 7] = mask[:, :, 7] = False
    results = []
    for poison in (0.0, math.nan):
        given = embeds.clone()
        given[:, 7] = poison
        # Only the attention module is called, because the rest of a layer would spread the NaN.
        out = models.ours.encoder.layer[0].attention.self(
            given.flatten(0, 1).requires_grad_(), BatchLayout(BATCH, LENGTH, mask=mask), True
        )
        qkv = models.ours.encoder.layer[0].attention.self.qkv
        seen = torch.arange(BATCH * LENGTH) % LENGTH != 7
        results.append(torch.autograd.grad(out[0][seen].square().sum(), [out[2], qkv.bias]))
        assert out[0][~seen].eq(0.0).all()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.every_case
def test_a_compiled_model_trains_through_states_and_weights() -> None:
    """For a loss of all outputs, a compiled model has the same gradients as an eager model."""
    model, result = pair("BertModel").ours, []
    for side in (torch.compile(model, backend="aot_eager", fullgraph=True), model):
        model.zero_grad()
        out = side(**batch(padded=True), **BOTH)
        seen = (*asked(out), out.pooler_output)
        torch.stack([each.square().sum() for each in seen]).sum().backward()
        result.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert result[0].keys() == result[1].keys()
    for name, gradient in result[1].items():
        torch.testing.assert_close(result[0][name], gradient)


def test_checkpointing_keeps_them() -> None:
    model, inputs = pair("BertModel", attention_probs_dropout_prob=0.3).ours.train(), batch()
    real, result = torch.ones(BATCH, LENGTH, dtype=torch.bool), []
    for checkpointed in (False, True):
        model.encoder.gradient_checkpointing = checkpointed
        torch.manual_seed(5)
        result.append(slopes(model, inputs, real))
    assert all(torch.equal(one, other) for one, other in zip(*result, strict=True))


@pytest.mark.parametrize("frozen", [False, True])
def test_the_fused_kernel_runs_where_no_gradient_is_wanted(monkeypatch, frozen: bool) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("attention_context was called")

    monkeypatch.setattr(attention, "attention_context", refuse)
    model = pair("BertModel").ours
    if frozen:
        model.requires_grad_(False)
    with torch.set_grad_enabled(frozen):
        model(**batch(padded=True), **BOTH)


# Tests of single functions: the layout of the weights, and the context computed from the weights


def test_the_weights_in_the_callers_layout_go_back_to_the_rows() -> None:
    mask = torch.rand(5, 11, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[2] = False
    indices, ends, longest = unpad_indices(mask)
    layout = BatchLayout(5, 11, ends, longest, indices)
    inside = torch.arange(longest) < ends.diff()[:, None]
    weights = torch.rand(5, 3, longest, longest) * (
        inside[:, None, :, None] & inside[:, None, None, :]
    )
    assert torch.equal(layout.weights_of_rows(layout.weights(weights)), weights)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("packed", [False, True])
def test_the_context_of_the_weights_is_the_output_of_attention(packed: bool, dropout_p) -> None:
    seed, ends = torch.tensor([11]), torch.tensor([0, 9, 9, 30, 32], dtype=torch.int32)
    q, k, v = torch.randn(3, 34, 2, 16) if packed else torch.randn(3, 2, 2, 21, 16)
    longest = {"max_seqlen_q": 21, "max_seqlen_k": 21}
    outs = []
    for dtype in (torch.float32, torch.float64):
        parts = [x.to(dtype) for x in (q, k, v)]
        drop = {"dropout_p": dropout_p, "dropout_seed": seed}
        if packed:
            outs.append(ops.attention_varlen(*parts, ends, **longest, **drop))
            weights = ops.attention_weights(*parts[:2], cu_seqlens_q=ends, **longest)
        else:
            outs.append(ops.attention(*parts, **drop))
            weights = ops.attention_weights(*parts[:2])
        outs.append(attention_context(weights, parts[2], ends if packed else None, **drop))
    fused, context, exact, _ = outs
    assert_close("context", context, exact, fused)
