"""The error for wrong input of a module names the argument, its value and the allowed values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers_pair import BATCH, LENGTH, SIZES, batch

from fastbert import modules
from fastbert.config import BertConfig

IDS = batch()["input_ids"]
TYPES = batch()["token_type_ids"]
FLAT = IDS[0]


def ends(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.long)


CASES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, ValueError, "input_ids, inputs_embeds: got neither"),
    (
        {"input_ids": IDS, "inputs_embeds": torch.zeros(BATCH, LENGTH, 48)},
        ValueError,
        "input_ids, inputs_embeds: got both",
    ),
    ({"input_ids": FLAT}, ValueError, r"input_ids: got shape \(19,\), allowed: \(B, L\)"),
    ({"input_ids": IDS + 500}, ValueError, r"input_ids: got \d+, allowed: 0 <= input_ids < 211"),
    ({"input_ids": IDS - 300}, ValueError, r"input_ids: got -\d+, allowed: 0 <= input_ids < 211"),
    ({"input_ids": IDS.float()}, TypeError, "input_ids: got torch.float32, allowed: int64, int32"),
    (
        {"input_ids": ones(2, 41)},
        ValueError,
        "input_ids: got a length of 41, allowed: at most max_position_embeddings = 40",
    ),
    (
        {"inputs_embeds": torch.zeros(2, 41, 48)},
        ValueError,
        "inputs_embeds: got a length of 41",
    ),
    (
        {"inputs_embeds": torch.zeros(BATCH, LENGTH, 47)},
        ValueError,
        r"inputs_embeds: got shape \(4, 19, 47\), allowed: \(B, L, 48\)",
    ),
    ({"inputs_embeds": ones(2, 3, 48)}, TypeError, "inputs_embeds: got torch.int64"),
    (
        {"input_ids": IDS, "token_type_ids": TYPES + 1},
        ValueError,
        "token_type_ids: got 2, allowed: 0 <= token_type_ids < 2",
    ),
    (
        {"input_ids": IDS, "token_type_ids": TYPES[:, 1:]},
        ValueError,
        r"token_type_ids: got shape \(4, 18\), allowed: \(4, 19\)",
    ),
    (
        {"input_ids": IDS, "position_ids": TYPES + 40},
        ValueError,
        r"position_ids: got 4\d, allowed: 0 <= position_ids < 40",
    ),
    (
        {"input_ids": IDS, "attention_mask": ones(BATCH, LENGTH + 1)},
        ValueError,
        r"attention_mask: got shape \(4, 20\), allowed: \(4, 19\)",
    ),
    (
        {"input_ids": IDS, "attention_mask": ones(BATCH, LENGTH) * 2},
        ValueError,
        r"attention_mask: got a value of 2, allowed in a \(B, L\) mask: 0 and 1",
    ),
    (
        {"input_ids": IDS, "attention_mask": torch.full((BATCH, LENGTH), -1e4)},
        ValueError,
        r"attention_mask: got a value of -10000\.0",
    ),
    (
        {"input_ids": IDS, "attention_mask": ones(BATCH, LENGTH, LENGTH - 1)},
        ValueError,
        r"attention_mask: got shape \(4, 19, 18\), allowed: \(4, 19\), \(4, 19, 19\), \(4, heads",
    ),
    (
        {"input_ids": IDS, "attention_mask": ones(BATCH, 2, LENGTH, LENGTH)},
        ValueError,
        r"mask: got shape \(4, 2, 19, 19\), allowed: .*\(4, 3, 19, 19\)",
    ),
    (
        {"input_ids": IDS, "attention_mask": ones(LENGTH - 1)},
        ValueError,
        r"mask: got shape \(18,\)",
    ),
    (
        {"input_ids": IDS, "attention_mask": ones(BATCH, LENGTH, LENGTH).float()},
        ValueError,
        "attention_mask: got a floating mask of zeros and ones",
    ),
    (
        {"input_ids": IDS, "attention_mask": ones(BATCH, LENGTH, LENGTH) * 3},
        ValueError,
        "attention_mask: got integers other than 0 and 1",
    ),
    ({"input_ids": IDS, "max_seqlen": 19}, ValueError, "max_seqlen: got 19 without cu_seqlens"),
    (
        {"input_ids": IDS, "cu_seqlens": ends(0, 19)},
        ValueError,
        r"input_ids: got shape \(4, 19\), allowed: \(T,\)",
    ),
    (
        {"input_ids": FLAT, "cu_seqlens": ends(0, 19), "attention_mask": ones(1, 19)},
        ValueError,
        r"attention_mask: got shape \(1, 19\) with cu_seqlens, allowed: None",
    ),
    (
        {"input_ids": FLAT, "cu_seqlens": ends(0, 19, dtype=torch.int64)},
        TypeError,
        "cu_seqlens: got torch.int64, allowed: int32",
    ),
    (
        {"input_ids": FLAT, "cu_seqlens": ends(0, 20)},
        ValueError,
        r"cu_seqlens: got \[0, 20\], allowed: from 0, never falling, at most 19",
    ),
    ({"input_ids": FLAT, "cu_seqlens": ends(0, 9, 5, 19)}, ValueError, "cu_seqlens: got"),
    ({"input_ids": FLAT, "cu_seqlens": ends(1, 19)}, ValueError, "cu_seqlens: got"),
    (
        {"input_ids": FLAT, "cu_seqlens": ends(0, 19).view(1, 2)},
        ValueError,
        r"cu_seqlens: got shape \(1, 2\), allowed: \(B \+ 1,\)",
    ),
    (
        {"input_ids": FLAT, "cu_seqlens": ends(0, 12, 19), "max_seqlen": 11},
        ValueError,
        "max_seqlen: got 11, allowed: at least 12",
    ),
    ({"input_ids": ones(41), "cu_seqlens": ends(0, 41)}, ValueError, "a length of 41"),
    ({"input_ids": IDS, "head_mask": ones(2, 3)}, TypeError, "head_mask"),
]


@pytest.fixture(scope="module")
def model() -> modules.BertModel:
    return modules.BertModel(BertConfig(**SIZES))


@pytest.mark.parametrize(("arguments", "error", "message"), CASES)
def test_arguments(
    model: modules.BertModel,
    arguments: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        model(**arguments)


@pytest.mark.parametrize(
    ("name", "labels", "message"),
    [
        ("BertForMaskedLM", {"labels": IDS[:, 1:]}, r"labels: got shape \(4, 18\)"),
        ("BertForMaskedLM", {"labels": IDS + 211}, "labels: got .* or -100"),
        (
            "BertForPreTraining",
            {"next_sentence_label": ends(0, 1, 2, 0)},
            "next_sentence_label: got 2",
        ),
        (
            "BertForNextSentencePrediction",
            {"labels": ends(0, 1)},
            "labels: got 2 labels, allowed: 4",
        ),
        ("BertForSequenceClassification", {"labels": ends(0, 1, 0, 7)}, "labels: got 7"),
        (
            "BertForSequenceClassification",
            {"labels": torch.zeros(4, 3)},
            r"labels: got shape \(4, 3\)",
        ),
        ("BertForTokenClassification", {"labels": IDS[:1]}, r"labels: got shape \(1, 19\)"),
        ("BertForMultipleChoice", {}, r"input_ids: got shape \(4, 19\), allowed: 3 dims"),
    ],
)
def test_labels(name: str, labels: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(modules, name)(BertConfig(**SIZES))(input_ids=IDS, **labels)


def test_a_head_that_the_configuration_does_not_fit() -> None:
    with pytest.raises(ValueError, match="num_labels: got 3, allowed: 2"):
        modules.BertForQuestionAnswering(BertConfig(**SIZES, num_labels=3))
    with pytest.raises(ValueError, match="problem_type: got 'ranking', allowed: None, regression"):
        BertConfig(**SIZES, problem_type="ranking")


def test_no_pooler() -> None:
    model = modules.BertModel(BertConfig(**SIZES), add_pooling_layer=False)
    assert model(IDS).pooler_output is None
    with pytest.raises(ValueError, match="pooler: got None"):
        model.pool(model.encode(IDS))


def test_backends(model: modules.BertModel) -> None:
    message = "backend: got 'cudnn', allowed: None, reference, triton, cuda, cpu"
    with pytest.raises(ValueError, match=message):
        modules.BertModel(BertConfig(**SIZES), backend="cudnn")
    before = model.backends()
    with pytest.raises(ValueError, match=message):
        model.set_backend("cudnn")
    assert model.backends() == before
