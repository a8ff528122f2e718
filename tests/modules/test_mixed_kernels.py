"""A layer may use CUDA C++ for attention, feed-forward or layer norm, and Triton for the rest.

Triton launchers replace the operators of the CUDA C++ extension. A wrong argument to an operator
therefore changes the result, and each call is counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from quick_cases import first_of_each

from fastbert import BertConfig, BertModel, ops
from fastbert.modules import executors
from fastbert.ops import backend as backends
from fastbert.ops.layer_parts import Parts

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or backends.unavailable("triton", "cpu") is not None,
    reason="runs in Triton's interpreter",
)
CONFIG = BertConfig.preset(
    "tiny", vocab_size=50, num_hidden_layers=2, hidden_size=64, num_attention_heads=2,
    intermediate_size=96,
)  # fmt: skip
OPERATORS = ("attention", "feed_forward", "layer_norm")
ALONE = [Parts()._replace(**{name: "cuda"}) for name in OPERATORS]
MIXES = [Parts(), *ALONE, Parts("cuda", "cuda", "cuda")]


@pytest.fixture
def extension(monkeypatch):
    """Replace the CUDA C++ operators by Triton launchers; return the counter of their calls."""
    from fastbert.kernels.attention import attention_backward, attention_forward
    from fastbert.kernels.feed_forward import linear_gelu_forward
    from fastbert.kernels.feed_forward_backward import feed_forward_backward
    from fastbert.kernels.layer_norm import layer_norm_backward, layer_norm_forward

    calls: Counter[str] = Counter()

    def options(mask, cu_q, cu_k, seed, max_q, max_k, dropout_p, scale) -> dict[str, Any]:
        assert cu_q is cu_k
        return {
            "mask": mask, "cu_seqlens_q": cu_q, "max_seqlen_q": max_q, "max_seqlen_k": max_k,
            "seed": seed, "dropout_p": dropout_p, "scale": scale,
        }  # fmt: skip

    def flash_attention_forward(q, k, v, *rest):
        calls["attention forward"] += 1
        return attention_forward(q, k, v, **options(*rest))

    def flash_attention_backward(dq, dk, dv, dout, q, k, v, out, lse, *rest):
        calls["attention backward"] += 1
        attention_backward(dout, q, k, v, out, lse, into=(dq, dk, dv), **options(*rest))

    def forward(x, weight, bias, residual, x_bias, seed, dropout_p, eps):
        calls["layer_norm forward"] += 1
        return layer_norm_forward(
            x, weight, bias, residual=residual, x_bias=x_bias, seed=seed, dropout_p=dropout_p,
            eps=eps,
        )  # fmt: skip

    def backward(dy, x, weight, mean, rstd, residual, x_bias, seed, has_bias, dropout_p):
        calls["layer_norm backward"] += 1
        grads = layer_norm_backward(
            dy, x, weight, mean, rstd, residual=residual, x_bias=x_bias, seed=seed,
            has_bias=has_bias, dropout_p=dropout_p,
        )  # fmt: skip
        return tuple(x.new_empty(0) if t is None else t for t in grads)

    def linear_gelu(x, weight, bias, activation, save):
        calls["feed_forward forward"] += 1
        y, h = linear_gelu_forward(x, weight, bias, activation=activation, save=save)
        return y, x.new_empty(0) if h is None else h

    def linear_gelu_gradient(dy, weight, h, activation, sum_rows):
        calls["feed_forward backward"] += 1
        return feed_forward_backward(dy, weight, h, activation=activation, sum_rows=sum_rows)

    for name, function in {
        "linear_gelu_forward": linear_gelu,
        "linear_gelu_gradient": linear_gelu_gradient,
        "flash_attention_forward": flash_attention_forward,
        "flash_attention_backward": flash_attention_backward,
        "layer_norm_forward": forward,
        "layer_norm_backward": backward,
    }.items():
        monkeypatch.setattr(torch.ops.fastbert_C, name, function, raising=False)
    return calls


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 50, (3, 7), generator=torch.Generator().manual_seed(0))
    exists = torch.arange(7) < torch.tensor([7, 4, 1])[:, None]
    return {"input_ids": ids * exists, "attention_mask": exists.long()}


def model() -> BertModel:
    torch.manual_seed(0)
    built = BertModel(CONFIG, backend="triton")
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return built.half()


@pytest.mark.parametrize(
    "mix", first_of_each([(mix,) for mix in MIXES], lambda mix: None, " ".join)
)
def test_inference_has_the_same_bits(extension, mix):
    built = model().eval()
    with torch.no_grad():
        expected = built(**batch(), output_hidden_states=True)
        assert not extension
        with mock.patch.object(executors, "choose_parts", return_value=mix):
            got = built(**batch(), output_hidden_states=True)
            last = built(**batch())
    for state, wanted in zip(got.hidden_states, expected.hidden_states, strict=True):
        assert torch.equal(state, wanted)
    assert torch.equal(last.last_hidden_state, expected.last_hidden_state)
    # The model, which has two layers, was called twice.
    assert extension["attention forward"] == 4 * (mix.attention == "cuda")
    assert extension["feed_forward forward"] == 4 * (mix.feed_forward == "cuda")
    assert extension["layer_norm forward"] == 8 * (mix.layer_norm == "cuda")


@pytest.mark.parametrize(
    "mix", first_of_each([(mix,) for mix in MIXES], lambda mix: None, " ".join)
)
def test_training_has_the_same_bits(extension, mix):
    def step(parts: Parts) -> list[torch.Tensor]:
        built = model().train()
        with mock.patch.object(executors, "choose_parts", return_value=parts):
            torch.manual_seed(1)
            out = built(**batch()).last_hidden_state
        out.sum().backward()
        return [out, *(p.grad for p in built.parameters() if p.grad is not None)]

    expected = step(Parts())
    assert not extension
    got = step(mix)
    assert len(got) == len(expected) > 20
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    for name, part in zip(OPERATORS, mix, strict=True):
        number = (2 if name == "layer_norm" else 1) * 2 * (part == "cuda")
        assert extension[f"{name} forward"] >= number
        assert extension[f"{name} backward"] == number
        if not number:
            assert not extension[f"{name} forward"]


def test_a_wrong_part_is_named():
    hidden, ends = torch.randn(3, 64), torch.tensor([0, 3], dtype=torch.int32)
    options = {"batch": 1, "heads": 2, "backend": "triton"}
    with pytest.raises(ValueError, match="attention_backend: got 'cpu', allowed: triton, cuda"):
        ops.encoder(hidden, [hidden], ends, 3, attention_backend="cpu", **options)
