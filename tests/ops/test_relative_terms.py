"""The formula of relative attention, its derivatives in closed form, and its softmax weights."""

from __future__ import annotations

import math

import pytest
import torch

from fastbert import ops, reference
from fastbert.ops import backend as backends
from fastbert.testing.cases import CASES
from fastbert.testing.parity import run_with_gradients
from fastbert.testing.random_cases import random_cases

OP = "relative_attention"
BACKENDS = [
    name
    for name in ("reference", "triton", "cpu")
    if backends.refusal(OP, name, backends.Request("cpu", torch.float32)) is None
]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def doubled(case):
    """Return the inputs of a case in float64."""

    def convert(_, value):
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if floating else value

    return case.inputs(torch.float32).map(convert)


def draw(queries=6, keys=9, batch=2, heads=3, dim=4, positions=5, dtype=torch.float32):
    """Return arguments with every term, for dense sequences."""
    shapes = {"q": queries, "k": keys, "v": keys}
    given = {name: torch.randn(batch, heads, n, dim, dtype=dtype) for name, n in shapes.items()}
    given["index"] = torch.randint(positions, (2 * max(queries, keys) + 3,)).int()
    for name in ("position_keys", "position_queries"):
        given[name] = torch.randn(positions, heads, dim, dtype=dtype)
    given["position_bias"] = torch.randn(positions, heads, dtype=dtype)
    given["segments"] = (torch.randint(2, (batch, queries)), torch.randint(2, (batch, keys)))
    given["segment_scores"] = torch.randn(batch, heads, queries, dtype=dtype)
    return given


def test_the_reference_is_the_formula():
    """Each logit is the sum of the terms in the docstring of `ops.relative_attention`."""
    g = draw(dtype=torch.float64)
    batch, heads, queries, keys = *g["q"].shape[:3], g["k"].shape[2]
    most = (len(g["index"]) + 1) // 2
    logits = torch.empty(batch, heads, queries, keys, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                for j in range(keys):
                    row = int(g["index"][i + keys - queries - j + most - 1])
                    q, k = g["q"][b, h, i], g["k"][b, h, j]
                    logit = q @ k + q @ g["position_keys"][row, h] + g["position_bias"][row, h]
                    logit += k @ g["position_queries"][row, h]
                    if g["segments"][0][b, i] != g["segments"][1][b, j]:
                        logit += g["segment_scores"][b, h, i]
                    logits[b, h, i, j] = logit / 2
    weights = logits.softmax(-1)
    got = reference.relative_attention(**g, scale=0.5, return_weights=True)
    torch.testing.assert_close(got, (weights @ g["v"], weights))


@pytest.mark.parametrize(
    "case",
    [case for case in (*CASES, *random_cases(12, 3, OP)) if case.op == OP],
    ids=lambda case: case.name,
)
def test_the_closed_form_is_the_derivative(case):
    """In float64, the backward of the backend "reference" agrees with autograd."""
    inputs = doubled(case)
    expected = run_with_gradients(reference.relative_attention, inputs, {})
    got = run_with_gradients(ops.relative_attention, inputs, {"backend": "reference"})
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_the_derivative_is_the_difference_quotient():
    given = draw(3, 4, 1, 2, 3, dtype=torch.float64)
    names = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    names.remove("index")

    def function(*leaves):
        changed = given | dict(zip(names, leaves, strict=True))
        return ops.relative_attention(**changed, backend="reference")

    assert torch.autograd.gradcheck(function, [given[n].requires_grad_() for n in names])


@each_backend
def test_weights_with_and_without_a_gradient(backend):
    given = draw()
    options = {"return_weights": True, "backend": backend}
    out, weights = ops.relative_attention(**given, **options)
    assert not weights.requires_grad
    given["position_keys"].requires_grad_()
    recorded = ops.relative_attention(**given, **options)
    torch.testing.assert_close(recorded, (out, weights))
    loss = (recorded[1] ** 2).sum()
    (gradient,) = torch.autograd.grad(loss, given["position_keys"])
    plain = reference.relative_attention(**given, return_weights=True)[1]
    (expected,) = torch.autograd.grad((plain**2).sum(), given["position_keys"])
    assert torch.equal(gradient, expected)
    with torch.no_grad():
        assert not ops.relative_attention(**given, **options)[1].requires_grad


@each_backend
@pytest.mark.parametrize("weights", [False, True])
def test_keys_that_nobody_attends_to_are_never_read(backend, weights):
    """NaN in such keys and values changes no result and no gradient, in plain PyTorch neither."""
    given = draw()
    given["mask"] = torch.rand(2, 9) < 0.7
    given["mask"][:, 4:6] = False
    leaves = ["q", "k", "v", "position_keys", "position_queries", "position_bias"]

    def results():
        inputs = {name: given[name].clone().requires_grad_() for name in leaves}
        options = {"return_weights": weights, "backend": backend}
        out = ops.relative_attention(**given | inputs, **options)
        total = sum(x.sum() for x in out) if weights else out.sum()
        return [total, *torch.autograd.grad(total, list(inputs.values()))]

    clean = results()
    given["k"][:, :, 4:6], given["v"][:, :, 4:6] = math.nan, math.nan
    for got, expected in zip(results(), clean, strict=True):
        assert torch.equal(got, expected)


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_and_scores_in_fp32_with_16_bits(backend, dtype):
    given = draw(dtype=dtype)
    for name in ("position_bias", "segment_scores"):
        given[name] = given[name].float().requires_grad_()
    out, weights = ops.relative_attention(**given, backend=backend, return_weights=True)
    assert out.dtype == weights.dtype == dtype
    out = ops.relative_attention(**given, backend=backend)
    assert out.dtype == dtype
    out.sum().backward()
    assert given["position_bias"].grad.dtype == given["segment_scores"].grad.dtype == torch.float32


@each_backend
def test_a_packed_sequence_is_the_dense_one(backend):
    given = draw(7, 7)
    packed = given | {name: given[name].transpose(1, 2).flatten(0, 1) for name in "qkv"}
    packed["segments"] = tuple(x.flatten() for x in given["segments"])
    packed["segment_scores"] = given["segment_scores"].transpose(1, 2).flatten(0, 1)
    cu_seqlens = torch.tensor([0, 7, 14], dtype=torch.int32)
    out = ops.relative_attention(**packed, cu_seqlens_q=cu_seqlens, backend=backend)
    dense = ops.relative_attention(**given, backend=backend)
    torch.testing.assert_close(out, dense.transpose(1, 2).flatten(0, 1))


def test_distances_of_padding_have_the_nearest_row():
    index = torch.tensor([7, 8, 9], dtype=torch.int32)
    lengths = (torch.tensor([2, 1]), torch.tensor([2, 2]))
    rows = reference.position_rows(index, 3, 2, lengths)
    assert rows.tolist() == [[[8, 7], [9, 8], [9, 9]], [[9, 8], [9, 9], [9, 9]]]
    assert reference.position_rows(index, 2, 2).tolist() == [[8, 7], [9, 8]]


def test_an_index_out_of_range_in_a_compiled_function_is_an_error():
    """torch.compile traces no check of values, and the kernels check them."""
    given = draw()
    if "cpu" not in BACKENDS:
        pytest.skip("the extension cannot run here")
    compiled = torch.compile(ops.relative_attention, fullgraph=True, backend="aot_eager")
    expected = ops.relative_attention(**given, backend="cpu")
    assert torch.equal(compiled(**given, backend="cpu"), expected)
    given["index"] = given["index"] + 5
    with pytest.raises(ValueError, match=r"^index: got [5-9], allowed: 0 to 4"):
        compiled(**given, backend="cpu")
