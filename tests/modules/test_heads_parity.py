"""Models with every head agree with eager transformers in outputs, loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers_pair import BATCH, LENGTH, SIZES, Judge, batch, batches, pair

VOCABULARY = SIZES["vocab_size"]
PER_TOKEN = ("BertForPreTraining", "BertForMaskedLM", "BertForTokenClassification")


def token_labels(inputs: dict[str, Tensor], classes: int) -> Tensor:
    labels = torch.randint(0, classes, (BATCH, LENGTH))
    labels = labels.masked_fill(torch.rand(BATCH, LENGTH) > 0.4, -100)
    mask = inputs.get("attention_mask")
    return labels if mask is None else labels.masked_fill(mask == 0, -100)


def with_labels(name: str, inputs: dict[str, Tensor], labels: int) -> dict[str, Any]:
    if name == "BertForPreTraining":
        return {
            **inputs,
            "labels": token_labels(inputs, VOCABULARY),
            "next_sentence_label": torch.randint(0, 2, (BATCH,)),
        }
    if name == "BertForMaskedLM":
        return {**inputs, "labels": token_labels(inputs, VOCABULARY)}
    if name == "BertForTokenClassification":
        return {**inputs, "labels": token_labels(inputs, labels)}
    if name == "BertForQuestionAnswering":
        starts, ends = torch.tensor([3, 0, 5, 90]), torch.tensor([[4], [0], [9], [2]])
        return {**inputs, "start_positions": starts, "end_positions": ends}
    if name == "BertForMultipleChoice":
        choices = {key: value.view(2, 2, LENGTH) for key, value in inputs.items()}
        return {**choices, "labels": torch.tensor([1, 0])}
    return {**inputs, "labels": torch.randint(0, labels, (BATCH,))}


def draws(name: str, labels: int = 2, *, padded: bool = False, **more: Any) -> list[dict[str, Any]]:
    torch.manual_seed(2)
    return [with_labels(name, inputs, labels) | more for inputs in batches(padded=padded)]


HEADS = {
    "BertForPreTraining": ("prediction_logits", "seq_relationship_logits"),
    "BertForMaskedLM": ("logits",),
    "BertForNextSentencePrediction": ("logits",),
    "BertForSequenceClassification": ("logits",),
    "BertForTokenClassification": ("logits",),
    "BertForQuestionAnswering": ("start_logits", "end_logits"),
    "BertForMultipleChoice": ("logits",),
}


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", HEADS)
def test_head(name: str, padded: bool) -> None:
    if padded and name == "BertForQuestionAnswering":
        pytest.skip("transformers' softmax runs over the padding too: test_answers_ignore_padding")
    classes = 2 if name in ("BertForQuestionAnswering", "BertForNextSentencePrediction") else 5
    models = pair(name, num_labels=classes)
    more = {"output_hidden_states": True, "output_attentions": True}
    judge = Judge(models, draws(name, classes, padded=padded, **more))
    mask = batch(padded=padded).get("attention_mask", torch.ones(BATCH, LENGTH)).bool()
    judge.agree("loss")
    for output in HEADS[name]:
        per_token = name in PER_TOKEN and output != "seq_relationship_logits"
        judge.agree(output, select=(lambda x: x[mask]) if per_token else (lambda x: x))
    judge.agree("hidden_states", select=lambda x: x[mask])
    judge.agree("attentions", select=lambda x: x.transpose(1, 2)[mask])
    judge.gradients_agree()
    ours, stock = judge.actual[0], judge.oracle[0]
    assert type(ours).__name__ == type(stock).__name__
    assert list(ours.keys())[: len(stock)] == list(stock.keys())


@pytest.mark.parametrize("name", ["BertForPreTraining", "BertForMaskedLM"])
def test_training_computes_the_same_without_logits(name: str) -> None:
    models = pair(name)
    models.ours.train()
    judge = Judge(models, draws(name, padded=True))
    assert "logits" not in judge.actual[0]
    assert "prediction_logits" not in judge.actual[0]
    judge.agree("loss")
    judge.gradients_agree()


@pytest.mark.parametrize(
    ("classes", "labels", "problem"),
    [
        (1, torch.randn(BATCH), None),
        (3, torch.randn(BATCH, 3), "regression"),
        (3, torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]]), None),
        (3, torch.tensor([0, 2, 1, 2]), None),
        (1, torch.randn(BATCH, 1), "regression"),
    ],
)
def test_problem_types(classes: int, labels: Tensor, problem: str | None) -> None:
    models = pair("BertForSequenceClassification", num_labels=classes, problem_type=problem)
    judge = Judge(models, batches(padded=True, labels=labels))
    judge.agree("loss", "logits")
    judge.gradients_agree()


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "relu", "silu"])
def test_activations(activation: str) -> None:
    models = pair("BertForMaskedLM", hidden_act=activation)
    judge = Judge(models, draws("BertForMaskedLM"))
    judge.agree("loss", "logits")
    judge.gradients_agree()


def test_an_untied_decoder() -> None:
    models = pair("BertForMaskedLM", tie_word_embeddings=False)
    judge = Judge(models, draws("BertForMaskedLM"))
    judge.agree("loss", "logits")
    judge.gradients_agree()


def test_answers_ignore_padding() -> None:
    model = pair("BertForQuestionAnswering").ours
    inputs = batch(padded=True)
    starts, ends = torch.tensor([3, 0, 5, 2]), torch.tensor([4, 0, 9, 2])
    together = model(**inputs, start_positions=starts, end_positions=ends)
    mask = inputs["attention_mask"].bool()
    assert (together.start_logits[~mask] == torch.finfo(torch.float32).min).all()
    losses = []
    for i in range(BATCH):
        alone = {name: value[i : i + 1, mask[i]] for name, value in inputs.items()}
        out = model(**alone, start_positions=starts[i : i + 1], end_positions=ends[i : i + 1])
        torch.testing.assert_close(out.start_logits[0], together.start_logits[i][mask[i]])
        losses.append(out.loss)
    torch.testing.assert_close(together.loss, torch.stack(losses).mean())


def test_answers_outside_the_text_count_as_in_transformers() -> None:
    answers = {
        "start_positions": torch.tensor([-1, -100, LENGTH - 1, LENGTH]),
        "end_positions": torch.tensor([[LENGTH + 7], [-1], [4], [0]]),
    }
    judge = Judge(pair("BertForQuestionAnswering"), batches(**answers))
    judge.agree("loss")
    judge.gradients_agree()


def test_answers_that_all_lie_beyond_the_text_cost_nothing() -> None:
    beyond = torch.full((BATCH,), LENGTH)
    model = pair("BertForQuestionAnswering").ours
    out = model(**batch(), start_positions=beyond, end_positions=beyond)
    assert out.loss.item() == 0.0


def test_only_both_labels_make_a_pre_training_loss() -> None:
    model = pair("BertForPreTraining").ours
    inputs = with_labels("BertForPreTraining", batch(), 2)
    both = model(**inputs)
    assert torch.equal(both.loss, both.mlm_loss + both.nsp_loss)
    next_sentence = inputs.pop("next_sentence_label")
    first = model(**inputs)
    assert first.loss is None
    assert torch.equal(first.mlm_loss, both.mlm_loss)
    inputs.pop("labels")
    second = model(**inputs, next_sentence_label=next_sentence)
    assert second.loss is None
    assert torch.equal(second.nsp_loss, both.nsp_loss)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("asked", [None, False, True])
def test_logits_are_computed_when_asked(training: bool, labelled: bool, asked: bool | None) -> None:
    model = pair("BertForMaskedLM").ours.train(training)
    inputs = with_labels("BertForMaskedLM", batch(padded=True), 2)
    inputs["labels"] = inputs["labels"] if labelled else None
    out = model(**inputs, output_logits=asked)
    assert (out.logits is not None) == (asked if asked is not None else not (training and labelled))
    assert (out.loss is not None) == labelled


@pytest.mark.parametrize("training", [False, True])
def test_a_batch_without_labelled_tokens_costs_nothing(training: bool) -> None:
    model = pair("BertForMaskedLM").ours.train(training)
    out = model(**batch(padded=True), labels=torch.full((BATCH, LENGTH), -100))
    assert out.loss.item() == 0.0
    out.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name
