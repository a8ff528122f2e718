"""Attention weights of chosen heads and rows are right with and without a saved log-sum-exp."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import BRAIN, HALF, SINGLE, normal

from fastbert import ops, reference
from fastbert.kernels.attention import attention_forward
from fastbert.kernels.attention_weights import attention_weights
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

pytestmark = pytest.mark.usefixtures("general_path")

SCALE = 0.125


def check(name, actual, function, tensors):
    """Compare `actual` with `function` of the tensors by the tolerance rule, without gradients."""

    def run(dtype):
        return function(*(x.cpu().to(dtype) for x in tensors))

    assert_close(name, actual, run(torch.float64), Yardstick(lambda: run(actual.dtype)))


def pairs(dtype, device, scale=1.0):
    q = normal(2, 3, 40, 64, dtype=dtype, device=device, scale=scale)
    return q, normal(2, 3, 97, 64, dtype=dtype, device=device, scale=scale)


@pytest.mark.parametrize("dtype", [SINGLE, HALF, BRAIN])
@pytest.mark.parametrize("with_lse", [False, True])
def test_chosen_heads_and_rows(dtype, with_lse, device):
    q, k = pairs(dtype, device)
    mask = (torch.rand(2, 3, 40, 97) > 0.3).to(device)
    mask[1, 2, 7] = False
    options = {"mask": mask, "scale": SCALE, "window": (60, 5)}
    lse = attention_forward(q, k, k, **options)[1] if with_lse else None
    heads, rows = [2, 0], [39, 7, 0, 7]
    weights = ops.attention_weights(q, k, lse, heads=heads, rows=rows, backend="triton", **options)
    assert weights.shape == (2, 2, 4, 97)
    assert torch.count_nonzero(weights[1, 0, 1]) == 0
    plain = {**options, "mask": mask.cpu(), "heads": heads, "rows": rows}
    check("weights", weights, lambda q, k: reference.attention_weights(q, k, **plain), [q, k])


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_of_ten_thousand(dtype, bias, device):
    """Weights of large logits are right; only in 16 bits may they use the rounded log-sum-exp."""
    q, k = pairs(dtype, device, scale=40.0)
    added = normal(1, 1, 1, 97, dtype=dtype, device=device) if bias else None
    expanded = None if added is None else added.expand(2, 3, 40, 97)
    _, lse = attention_forward(q, k, k, bias=expanded, scale=SCALE)
    weights = attention_weights(q, k, lse, bias=expanded, scale=SCALE)

    def function(q, k):
        cast = None if added is None else added.cpu().to(q.dtype)
        return reference.attention_weights(q, k, bias=cast, scale=SCALE)

    check("weights", weights, function, [q, k])
    # A rounding error of lse scales all weights of a row alike, which only the sum of the row
    # shows.
    check("sums", weights.sum(-1), lambda q, k: function(q, k).sum(-1), [q, k])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 8)}])
def test_packed_sequences(options, device):
    """Weights outside a sequence are 0, although rows after the last sequence are NaN."""
    lengths_q, lengths_k = (33, 0, 9), (20, 5, 40)
    cu_q = torch.tensor([0, *lengths_q]).cumsum(0).int().to(device)
    cu_k = torch.tensor([0, *lengths_k]).cumsum(0).int().to(device)
    q = normal(sum(lengths_q) + 4, 2, 16, dtype=SINGLE, device=device)
    k = normal(sum(lengths_k) + 4, 2, 16, dtype=SINGLE, device=device)
    q[-4:], k[-4:] = math.nan, math.nan
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "heads": [1], "rows": [0, 8, 32]}
    weights = ops.attention_weights(q, k, backend="triton", **packed, **options)
    assert weights.shape == (3, 1, 3, 40)
    assert torch.count_nonzero(weights[1]) == 0
    assert torch.count_nonzero(weights[0, :, :, 20:]) == 0
    packed |= {"cu_seqlens_q": cu_q.cpu(), "cu_seqlens_k": cu_k.cpu()}
    check(
        "weights",
        weights,
        lambda q, k: reference.attention_weights(q, k, **packed, **options),
        [q[:-4], k[:-4]],
    )


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_gradients_of_chosen_weights(backend, is_packed, device):
    shape = (58, 2, 32) if is_packed else (2, 2, 29, 32)
    q, k = (normal(*shape, dtype=SINGLE, device=device).requires_grad_() for _ in range(2))
    bias = normal(1, 2, 1, 29, dtype=SINGLE, device=device).requires_grad_()
    options = {"heads": [1], "rows": [28, 3, 3, *range(4, 20)]}
    lengths = torch.tensor([0, 29, 58], dtype=torch.int32)
    if is_packed:
        options["cu_seqlens_q"] = lengths.to(device)
    weights = ops.attention_weights(q, k, bias=bias, backend=backend, **options)
    dweights = torch.randn(weights.shape)
    got = torch.autograd.grad(weights, (q, k, bias), dweights.to(device))
    if is_packed:
        options["cu_seqlens_q"] = lengths

    def run(dtype):
        x = [x.detach().cpu().to(dtype).requires_grad_() for x in (q, k, bias)]
        weights = reference.attention_weights(*x[:2], bias=x[2], **options)
        return torch.autograd.grad(weights, x, dweights.to(dtype))

    sides = run(torch.float64), Yardstick(lambda: run(SINGLE))
    for name, *triple in zip("qkb", got, *sides, strict=True):
        assert_close(f"d{name}", *triple)


def test_weights_on_request_take_the_forwards_lse(device):
    """In 16-bit dtypes, weights are right with and without the log-sum-exp of the forward."""
    q, k = pairs(HALF, device)
    out, weights = ops.attention(q, k, k, return_weights=True, backend="triton")
    alone = ops.attention_weights(q, k, backend="triton")
    oracle = reference.attention_weights(q.double().cpu(), k.double().cpu())
    yardstick = Yardstick(lambda: reference.attention_weights(q.cpu(), k.cpu()))
    assert_close("with lse", weights, oracle, yardstick)
    assert_close("without", alone, oracle, yardstick)
    assert out.shape == q.shape


def test_errors_name_the_argument(device):
    q = torch.zeros(1, 2, 4, 16, device=device)
    with pytest.raises(ValueError, match=r"heads: got \[2\], allowed: numbers from 0 to 1"):
        ops.attention_weights(q, q, heads=[2])
    with pytest.raises(ValueError, match=r"rows: got \[-1\], allowed: numbers from 0 to 3"):
        ops.attention_weights(q, q, rows=[-1])
    with pytest.raises(ValueError, match=r"lse: got shape \(1, 2\), allowed: \(1, 2, 4\)"):
        ops.attention_weights(q, q, torch.zeros(1, 2, device=device))
    with pytest.raises(TypeError, match=r"lse: got torch.float16, allowed: float32"):
        ops.attention_weights(q, q, torch.zeros(1, 2, 4, device=device).half())
