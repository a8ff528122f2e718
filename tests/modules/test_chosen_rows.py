"""In CPU training, the last layer computes only the rows that the model's head reads."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fastbert import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForSequenceClassification,
)
from fastbert.modules import executors
from fastbert.modules.encoder import BertEncoder
from fastbert.ops import backend as backends

CONFIG = BertConfig.preset(
    "tiny", vocab_size=61, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
)
LENGTHS = {"padded": (9, 5, 12, 1), "uniform": (7, 7, 7), "with an empty sequence": (8, 0, 6)}
needs_cpu = pytest.mark.skipif(
    backends.EXTENSION is None, reason="fastbert._C is needed for layers as one function"
)


def batch_of(lengths):
    torch.manual_seed(2)
    longest = max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)
    ids = torch.randint(5, 61, mask.shape)
    labels = torch.where(torch.rand(mask.shape) < 0.2, ids, -100).masked_fill(~mask, -100)
    labels[0, 2] = 7
    return {"input_ids": ids, "attention_mask": mask.long()}, labels


def inputs_of(kind, lengths):
    given, labels = batch_of(lengths)
    if kind is BertForMultipleChoice:
        return {name: x.unsqueeze(0) for name, x in given.items()} | {"labels": torch.tensor([1])}
    if kind in (BertForMaskedLM, BertForPreTraining):
        more = {"next_sentence_label": torch.arange(len(lengths)) % 2}
        return given | {"labels": labels} | (more if kind is BertForPreTraining else {})
    return given | {"labels": torch.arange(len(lengths)) % 2}


def model_of(kind, config=CONFIG):
    torch.manual_seed(1)
    return kind(config).train()


def step(model, inputs):
    """Return the loss and the gradients of all parameters."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture
def chosen(monkeypatch):
    """Return a list that collects the results of ``BertEncoder.choose``."""
    calls, choose = [], BertEncoder.choose

    def spy(*arguments):
        calls.append(choose(*arguments))
        return calls[-1]

    monkeypatch.setattr(BertEncoder, "choose", spy)
    return calls


@pytest.mark.parametrize("one_function", [True, False], ids=["function", "operations"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(
    "kind",
    [
        BertForPreTraining,
        BertForMaskedLM,
        BertForNextSentencePrediction,
        BertForSequenceClassification,
        BertForMultipleChoice,
    ],
)
def test_a_step_is_that_of_all_rows(kind, lengths, one_function, chosen, monkeypatch):
    if not one_function:
        plan = BertEncoder.plan
        monkeypatch.setattr(BertEncoder, "plan", lambda *given: plan(*given)._replace(run=None))
    model, inputs = model_of(kind), inputs_of(kind, lengths)
    loss, gradients = step(model, inputs)
    assert chosen[0] is not None
    assert chosen[0].indices.shape[0] <= sum(lengths) / 2
    monkeypatch.setattr(BertEncoder, "choose", lambda *_: None)
    all_loss, all_gradients = step(model, inputs)
    torch.testing.assert_close(loss, all_loss, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        largest = float(all_gradients[name].abs().max())
        torch.testing.assert_close(
            gradient, all_gradients[name], rtol=0, atol=2e-6 * largest + 1e-8, msg=name
        )


def test_packed_input_has_the_loss_of_padded_input(chosen):
    model, inputs = model_of(BertForMaskedLM), inputs_of(BertForMaskedLM, LENGTHS["padded"])
    exists = inputs["attention_mask"].bool()
    ends = torch.tensor([0, *LENGTHS["padded"]]).cumsum(0).int()
    packed = {name: inputs[name][exists] for name in ("input_ids", "labels")}
    padded_loss, _ = step(model, inputs)
    loss, _ = step(model, packed | {"cu_seqlens": ends})
    assert torch.equal(loss, padded_loss)
    assert all(choice is not None for choice in chosen)


@needs_cpu
def test_the_last_layer_gets_the_chosen_rows_only(monkeypatch):
    counts, run = [], executors.cpu_layer

    def spy(*arguments):
        counts.append(run(*arguments).shape[0])
        return run(*arguments)

    monkeypatch.setattr(executors, "cpu_layer", spy)
    lengths = LENGTHS["padded"]
    step(model_of(BertForSequenceClassification), inputs_of(BertForNextSentencePrediction, lengths))
    assert counts == [sum(lengths), len(lengths)]


def with_hook(model):
    model.bert.encoder.layer[-1].output.register_forward_hook(lambda *_: None)
    return {}


def with_dropout(model):
    model.bert.encoder.layer[-1].attention.self.dropout_p = 0.1
    return {}


def with_most_labels(model):
    return {"labels": batch_of(LENGTHS["padded"])[0]["input_ids"]}


@pytest.mark.parametrize(
    "change",
    [
        with_hook,
        with_dropout,
        with_most_labels,
        lambda _: {"output_logits": True},
        lambda _: {"output_hidden_states": True},
        lambda _: {"output_attentions": [0]},
    ],
    ids=["hook", "dropout", "most labels", "logits", "states", "attentions"],
)
def test_all_rows_are_computed_if_something_else_reads_them(change, chosen):
    model = model_of(BertForMaskedLM)
    step(model, inputs_of(BertForMaskedLM, LENGTHS["padded"]) | change(model))
    assert all(choice is None for choice in chosen)


def test_checkpointing_gives_the_same_step(chosen):
    model, inputs = model_of(BertForMaskedLM), inputs_of(BertForMaskedLM, LENGTHS["padded"])
    loss, gradients = step(model, inputs)
    model.bert.encoder.gradient_checkpointing = True
    again, gradients_again = step(model, inputs)
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], g) for name, g in gradients_again.items())
    assert len(chosen) == 2
    assert None not in chosen


def test_another_dropout_of_the_model_keeps_the_choice(chosen):
    config = dataclasses.replace(CONFIG, classifier_dropout=0.5)
    model = model_of(BertForSequenceClassification, config)
    step(model, inputs_of(BertForNextSentencePrediction, LENGTHS["padded"]))
    assert chosen[0] is not None
