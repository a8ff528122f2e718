"""The options of ``SentenceTransformer.encode`` give the results of stock, accelerated."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_sentence_models as tiny
import torch
from tiny_models import rows_computed
from tiny_sentence_models import TEXTS
from torch import Tensor

import fastbert
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import run_sides

pytest.importorskip("sentence_transformers", minversion="6")
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

POOLINGS = ("mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
PROMPTS = {"query": "w1 w2", "document": "w9"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return tiny.checkpoints(tmp_path_factory)


def build(folder: Path, pooling: str = "mean", prompted: bool = True, **options: Any) -> Any:
    """Return a stock model; `prompted` says whether the mean includes the tokens of the prompt."""
    encoder = Transformer(str(folder), model_kwargs={"attn_implementation": "eager"})
    modules = [encoder, Pooling(48, pooling, include_prompt=prompted), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu", **options).eval()


def encode(model: Any, **options: Any) -> Tensor:
    return model.encode(TEXTS, batch_size=8, convert_to_tensor=True, **options)


def agree(sides: Any, **options: Any) -> Tensor:
    results = run_sides(lambda model: encode(model, **options), *sides)
    assert_close(str(options), *results)
    assert results[0].dtype == results[2].library.dtype
    return results[0]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_poolings(folders, pooling, side, dtype):
    agree(tiny.sides(build(folders("Bert", side), pooling), dtype))


@pytest.mark.parametrize("prompted", [True, False])
def test_prompts(folders, prompted):
    options = {"prompts": PROMPTS, "default_prompt_name": "document"}
    sides = tiny.sides(build(folders(), prompted=prompted, **options))
    results = [
        agree(sides),
        agree(sides, prompt_name="query"),
        agree(sides, prompt="w20 w21 w22"),
        agree(sides, prompt=""),
    ]
    for i, result in enumerate(results):
        assert all(not torch.equal(result, other) for other in results[:i])
    same = {"convert_to_tensor": True, "batch_size": 8}
    assert torch.equal(sides[0].encode_query(TEXTS, **same), results[1])
    assert torch.equal(sides[0].encode_document(TEXTS, **same), results[0])


@pytest.mark.parametrize("normalize", [True, False])
def test_truncated_embeddings(folders, normalize):
    sides = tiny.sides(build(folders(), truncate_dim=20))
    assert agree(sides, normalize_embeddings=normalize).shape == (len(TEXTS), 20)
    fewer = agree(sides, truncate_dim=7, normalize_embeddings=normalize)
    assert fewer.shape == (len(TEXTS), 7)
    norms = fewer.norm(dim=1)
    assert torch.allclose(norms, torch.ones_like(norms)) == normalize
    for model in sides:
        with model.truncate_embeddings(3):
            assert encode(model).shape == (len(TEXTS), 3)


@pytest.mark.parametrize("precision", ["float32", "int8", "uint8", "binary", "ubinary"])
def test_precisions(folders, precision):
    """Codes of int8 and uint8 may differ by 1, because two roundings may fall into other buckets.

    The range of the codes of a dimension comes from the embeddings themselves. The largest
    embedding is exactly at a border of two buckets, so its code may be 254 or 255.
    """
    fast, _, stock = tiny.sides(build(folders()))
    texts = [f"w{i} w{(7 * i) % 92} w{(i * i) % 92}" for i in range(92)] + TEXTS
    actual, expected = (model.encode(texts, precision=precision) for model in (fast, stock))
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if precision == "float32":
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    elif precision.endswith("int8"):
        apart = np.abs(actual.astype(int) - expected.astype(int))
        assert apart.max() <= 1
        assert apart.mean() < 0.02
        assert len(np.unique(expected)) > 200
    else:
        # A bit is the sign of an element, which is known unless the element is almost 0.
        offset = 128 if precision == "binary" else 0
        bits = [
            np.unpackbits((codes.astype(int) + offset).astype(np.uint8), axis=1)
            for codes in (actual, expected)
        ]
        near_zero = np.abs(stock.encode(texts)) < 1e-5
        assert near_zero.mean() < 0.001
        assert np.array_equal(bits[0][~near_zero], bits[1][~near_zero])


def test_kinds_of_results(folders):
    fast, _, stock = tiny.sides(build(folders()))
    for options in ({}, {"convert_to_numpy": False}, {"convert_to_tensor": True}):
        actual, expected = (model.encode(TEXTS, **options) for model in (fast, stock))
        assert type(actual) is type(expected)
        assert type(actual[0]) is type(expected[0])
    one, several = fast.encode(TEXTS[2]), fast.encode(TEXTS)
    np.testing.assert_allclose(one, several[2], rtol=1e-5, atol=1e-6)
    assert fast.encode([]).shape == stock.encode([]).shape


def test_token_embeddings(folders):
    fast, oracle, stock = tiny.sides(build(folders()))
    results = run_sides(
        lambda model: torch.cat(model.encode(TEXTS, output_value="token_embeddings")),
        fast, oracle, stock,
    )  # fmt: skip
    assert_close("token embeddings", *results)
    features = [model.encode(TEXTS, output_value=None) for model in (fast, stock)]
    for actual, expected in zip(*features, strict=True):
        assert actual.keys() == expected.keys()
        exists = expected["attention_mask"].bool()
        assert not actual["token_embeddings"][~exists].any()
        torch.testing.assert_close(
            actual["token_embeddings"][exists], expected["token_embeddings"][exists],
            rtol=1e-4, atol=1e-4,
        )  # fmt: skip


def test_features_that_are_used_twice(folders):
    """``Transformer`` passes what the first call has written to the encoder, which ignores it."""
    fast, _, stock = tiny.sides(build(folders()))
    for model in (fast, stock):
        model[0].model.config.output_hidden_states = True
    features = [model.preprocess(TEXTS) for model in (fast, stock)]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with rows_computed() as rows:
                actual = fast(features[0])["sentence_embedding"]
            assert rows
            torch.testing.assert_close(actual, stock(features[1])["sentence_embedding"])
    written = {"token_embeddings", "sentence_embedding", "all_layer_embeddings"}
    assert written <= features[0].keys() - fast.preprocess(TEXTS).keys()


def test_layers_that_are_read_by_a_module(folders):
    """The module asks for the hidden states of all layers and weighs them."""
    from sentence_transformers.sentence_transformer.modules import WeightedLayerPooling

    encoder = Transformer(
        str(folders()),
        model_kwargs={"attn_implementation": "eager"},
        config_kwargs={"output_hidden_states": True},
    )
    modules = [encoder, WeightedLayerPooling(48, num_hidden_layers=2, layer_start=0), Pooling(48)]
    agree(tiny.sides(SentenceTransformer(modules=modules, device="cpu").eval()))


def test_texts_are_cut_at_the_length_of_the_model(folders):
    model = build(folders())
    model.max_seq_length = 6
    sides = tiny.sides(model)
    result = agree(sides)
    torch.testing.assert_close(result[2], sides[0].encode("w0 w1 w2 w3", convert_to_tensor=True))


def test_a_model_without_its_prompt_is_accelerated_after_saving(folders, tmp_path):
    model = fastbert.accelerate(build(folders(), prompts=PROMPTS, truncate_dim=9))
    expected = model.encode_query(TEXTS)
    model.save_pretrained(str(tmp_path))
    opened = fastbert.accelerate(SentenceTransformer(str(tmp_path), device="cpu", truncate_dim=9))
    assert opened.prompts == model.prompts
    assert np.array_equal(opened.encode_query(TEXTS), expected)
