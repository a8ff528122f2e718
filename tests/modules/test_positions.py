"""Rotary positions and the bias by distance agree with transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastbert import ops
from fastbert.modules.positions import DistanceBias, frequencies, rotation
from fastbert.testing.compare import assert_close

pytest.importorskip("transformers")

from transformers import MPNetConfig, NomicBertConfig
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.nomic_bert.modeling_nomic_bert import (
    NomicBertRotaryEmbedding,
    apply_rotary_pos_emb,
)

HEADS = 3


def test_buckets() -> None:
    distance = torch.arange(-600, 601)
    expected = MPNetEncoder.relative_position_bucket(distance, num_buckets=32)
    actual = DistanceBias(32, HEADS).buckets(distance)
    assert torch.equal(actual, expected)
    assert set(actual.tolist()) == set(range(32)) - {16}  # bucket 16: no positive distance is 0


@pytest.mark.parametrize("length", [1, 9, 200])
def test_bias(length) -> None:
    sizes = {"hidden_size": 12, "num_attention_heads": HEADS, "num_hidden_layers": 1}
    stock = MPNetEncoder(MPNetConfig(**sizes))
    ours = DistanceBias(32, HEADS)
    ours.weight = stock.relative_attention_bias.weight
    expected = stock.compute_position_bias(torch.zeros(2, length, 12))
    actual = ours(torch.arange(length)[None])
    assert actual.shape == (1, HEADS, length, length)
    assert torch.equal(actual.expand_as(expected), expected)


def test_bias_of_places_with_gaps() -> None:
    ours = DistanceBias(32, HEADS)
    whole = ours(torch.arange(40)[None])[0]
    places = torch.tensor([[0, 1, 5, 39], [3, 4, 20, 21]])
    actual = ours(places)
    for row, kept in zip(actual, places, strict=True):
        assert torch.equal(row, whole[:, kept[:, None], kept])


def stock_rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotate x of shape (T, heads, D) by the code of transformers, with angles in fp32."""
    heads, size = x.shape[1:]
    config = NomicBertConfig(
        hidden_size=heads * size,
        num_attention_heads=heads,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    cos, sin = NomicBertRotaryEmbedding(config)(x, positions[None])
    rows = x.transpose(0, 1)[None]
    return apply_rotary_pos_emb(rows, rows, cos, sin)[0][0].transpose(0, 1)


def rotate(x: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
    return ops.rotary(x, *by, heads=x.shape[1], backend="reference")


@pytest.mark.parametrize("base", [1000.0, 10_000.0, 160_000.0, 3.0])
@pytest.mark.parametrize("size", [2, 16, 64])
def test_rotation(base, size) -> None:
    positions = torch.cat([torch.arange(40), torch.tensor([511, 8191, 3])])
    x = torch.randn(len(positions), HEADS, size)
    by = rotation(positions, frequencies(base, size, positions.device))
    assert by[0].dtype == torch.float32
    assert by[0].shape == (len(positions), size // 2)
    assert torch.equal(rotate(x, by), stock_rotate(x, positions, base))
    exact = rotate(x.double(), by)
    assert exact.dtype == torch.float64
    # fastbert and transformers compute cosines in fp32, but not always by the same routine.
    torch.testing.assert_close(exact, stock_rotate(x.double(), positions, base), atol=1e-6, rtol=0)
    assert_close("float32", rotate(x, by), exact, stock_rotate(x, positions, base))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotation_in_low_precision_rounds_once(dtype) -> None:
    positions = torch.arange(40)
    x = torch.randn(40, HEADS, 16).to(dtype)
    by = rotation(positions, frequencies(1000.0, 16, positions.device))
    actual = rotate(x, by)
    exact = rotate(x.double(), by)
    assert_close(str(dtype), actual, exact, exact.to(dtype))


def test_rotation_keeps_lengths_and_shows_distances_alone() -> None:
    x, y = torch.randn(2, 1, HEADS, 16, dtype=torch.float64).unbind()
    places = torch.arange(30)
    by = rotation(places, frequencies(1000.0, 16, places.device))
    turned = rotate(x.expand(30, -1, -1), by), rotate(y.expand(30, -1, -1), by)
    torch.testing.assert_close(turned[0].norm(dim=-1), x.norm(dim=-1).expand(30, HEADS))
    logits = torch.einsum("qhd,khd->hqk", *turned)
    torch.testing.assert_close(logits[:, 5:, 5:], logits[:, :-5, :-5], atol=1e-5, rtol=0)


def test_gradients_pass() -> None:
    by = rotation(torch.arange(3), frequencies(10.0, 4, torch.device("cpu")))
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, by), x, check_undefined_grad=False)
