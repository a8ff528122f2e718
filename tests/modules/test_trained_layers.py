"""Layers of BERT in training as one function each: the same bits, and who runs them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from fastbert import BertConfig, BertForPreTraining
from fastbert.modules import executors
from fastbert.modules.encoder import BertEncoder
from fastbert.ops import backend as backends

pytestmark = pytest.mark.skipif(
    backends.EXTENSION is None, reason="the layers run in fastbert._C, which is not built"
)
CONFIG = BertConfig.preset("tiny", vocab_size=61)
LENGTHS = {"padded": (9, 5, 12, 1), "uniform": (7, 7, 7)}


def model_of(dropout_p, **options):
    torch.manual_seed(1)
    return BertForPreTraining(
        dataclasses.replace(
            CONFIG,
            hidden_dropout_prob=dropout_p,
            attention_probs_dropout_prob=dropout_p,
            **options,
        )
    ).train()


def inputs_of(lengths):
    torch.manual_seed(2)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    ids = torch.randint(5, 61, mask.shape)
    labels = torch.where(mask & (torch.rand(mask.shape) < 0.3), ids, -100)
    nsp = torch.arange(len(lengths)) % 2
    given = {"input_ids": ids, "attention_mask": mask.long()}
    return given | {"labels": labels, "next_sentence_label": nsp}


def step(model, inputs):
    """Return the loss and the gradients that exist, with the same dropout at each call."""
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {name: gradient.clone() for name, gradient in gradients.items()}


@pytest.fixture
def runs(monkeypatch):
    """Return the list to which each layer that runs as one function adds its settings."""
    found, run = [], executors.trained_layer

    def spy(*arguments):
        found.append(arguments[-1])
        return run(*arguments)

    monkeypatch.setattr(executors, "trained_layer", spy)
    return found


@pytest.mark.parametrize("hidden_act", ["gelu", "relu", "gelu_new"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_bits_are_those_of_the_operations(lengths, dropout_p, hidden_act, runs, monkeypatch):
    model, inputs = model_of(dropout_p, hidden_act=hidden_act), inputs_of(lengths)
    loss, gradients = step(model, inputs)
    assert [settings.dropouts for settings in runs] == 2 * [(dropout_p,) * 3]
    plan = BertEncoder.plan
    monkeypatch.setattr(BertEncoder, "plan", lambda *given: plan(*given)._replace(run=None))
    expected_loss, expected = step(model, inputs)
    assert len(runs) == 2
    assert torch.equal(loss, expected_loss)
    assert [name for name in expected if not torch.equal(gradients[name], expected[name])] == []


def with_forward_hook(model):
    model.bert.encoder.layer[0].attention.output.dense.register_forward_hook(lambda *_: None)


def with_backward_hook(model):
    model.bert.encoder.layer[1].output.register_full_backward_hook(lambda *_: None)


def frozen(model):
    model.bert.encoder.layer[0].output.dense.bias.requires_grad_(False)


def with_adapter(model):
    class Adapted(nn.Linear):
        pass

    dense = Adapted(CONFIG.hidden_size, CONFIG.hidden_size)
    model.bert.encoder.layer[1].attention.output.dense = dense


def of_the_reference(model):
    model.bert.encoder.layer[0].attention.self.set_backend("reference")


@pytest.mark.parametrize(
    "change", [with_forward_hook, with_backward_hook, frozen, with_adapter, of_the_reference]
)
def test_other_layers_run_operation_by_operation(change, runs):
    model = model_of(0.0)
    change(model)
    step(model, inputs_of(LENGTHS["padded"]))
    assert runs == []


def test_autocast_and_other_dtypes_run_operation_by_operation(runs):
    with torch.autocast("cpu", torch.bfloat16):
        step(model_of(0.0), inputs_of(LENGTHS["padded"]))
    step(model_of(0.0).bfloat16(), inputs_of(LENGTHS["padded"]))
    assert runs == []


def test_a_profiler_sees_every_operation(runs):
    with torch.profiler.profile() as profile:
        step(model_of(0.0), inputs_of(LENGTHS["padded"]))
    assert runs == []
    assert any(event.key == "fastbert::feed_forward" for event in profile.key_averages())


def test_an_operation_per_layer_frees_what_the_backward_read():
    model, inputs = model_of(0.0), inputs_of(LENGTHS["padded"])
    loss = model(**inputs).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
