"""The scores of additive attention: their formula, their memory, and their operator."""

from __future__ import annotations

import importlib

import pytest
import torch
from _largest_tensor import largest_tensor
from torch import Tensor

from fastbert import ops, reference
from fastbert.testing.compare import compare_all
from fastbert.testing.yardstick import Yardstick

# The name `fastbert.ops.additive_scores` is the function.
MODULE = importlib.import_module("fastbert.ops.additive_scores")
# Each size of a block divides other dimensions: all of them, keys, queries, sequences, and none.
BLOCKS = (1, 13 * 3, 13 * 7 * 2, 13 * 7 * 5 * 2, 2**18)
NAMES = ("scores", "query", "keys", "v")


def small_blocks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for name in ("CPU_BLOCK", "OTHER_BLOCK"):
        monkeypatch.setattr(MODULE, name, size)


def inputs(batch=3, rows=5, columns=7, width=13, device="cpu") -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((batch, rows, width), (batch, columns, width), (width,))
    query, keys, v = (torch.randn(shape, device=device) for shape in shapes)
    return query, keys, v


def loops(query: Tensor, keys: Tensor, v: Tensor) -> Tensor:
    """Return the scores, pair by pair."""
    batch, rows, columns = query.shape[0], query.shape[1], keys.shape[1]
    pairs = [
        (torch.tanh(query[b, i] + keys[b, j]) * v).sum()
        for b in range(batch)
        for i in range(rows)
        for j in range(columns)
    ]
    return torch.stack(pairs).view(batch, rows, columns)


def results(function, tensors, upstream: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    scores = function(*leaves)
    gradients = torch.autograd.grad(scores, leaves, upstream.to(scores.dtype))
    return dict(zip(NAMES, (scores.detach(), *gradients), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_the_scores_are_their_formula(block, dtype, device, monkeypatch) -> None:
    small_blocks(monkeypatch, block)
    tensors = [x.to(dtype) for x in inputs(device=device)]
    upstream = torch.randn(3, 5, 7, device=device)
    actual = results(ops.additive_scores, tensors, upstream, dtype)
    oracle = results(loops, tensors, upstream, torch.float64)
    assert actual["scores"].dtype == torch.float32

    def in_dtype() -> dict[str, Tensor]:
        found = results(reference.additive_scores, tensors, upstream, dtype)
        return {**found, "scores": found["scores"].float()}

    for comparison in compare_all(actual, oracle, Yardstick(in_dtype)):
        assert comparison.passed, str(comparison)


@pytest.mark.parametrize("block", BLOCKS)
def test_gradients_by_finite_differences(block, monkeypatch) -> None:
    small_blocks(monkeypatch, block)
    tensors = [x.double().requires_grad_() for x in inputs(2, 3, 7, 13)]
    assert torch.autograd.gradcheck(ops.additive_scores, tensors)


@pytest.mark.parametrize(
    ("batch", "rows", "columns", "width"),
    [(2, 40, 50, 64), (1, 2, 300, 64), (60, 4, 3, 64), (1, 300, 2, 64)],
)
def test_no_block_is_larger_than_allowed(batch, rows, columns, width, monkeypatch, device) -> None:
    """Neither pass makes or keeps a tensor of the size of all pairs times the width."""
    block, pairs = 2000, batch * rows * columns
    small_blocks(monkeypatch, block)
    tensors = [x.requires_grad_() for x in inputs(batch, rows, columns, width, device)]
    with largest_tensor() as blocks:
        ops.additive_scores(*tensors).sum().backward()
    assert pairs <= blocks.elements <= max(block, pairs, *(x.numel() for x in tensors))
    with largest_tensor() as plain:
        reference.additive_scores(*tensors).sum().backward()
    assert plain.elements == pairs * width > blocks.elements


def test_opcheck(device, monkeypatch) -> None:
    small_blocks(monkeypatch, 13 * 7 * 2)
    tensors = [x.requires_grad_() for x in inputs(device=device)]
    namespace = torch.ops.fastbert
    torch.library.opcheck(namespace.additive_scores.default, tuple(tensors))
    detached = [x.detach() for x in tensors]
    upstream = torch.randn(3, 5, 7, device=device)
    torch.library.opcheck(namespace.additive_scores_backward.default, (upstream, *detached))


def test_compiles_in_one_graph(device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(ops.additive_scores, fullgraph=True, backend="aot_eager")
    upstream, tensors = torch.randn(3, 5, 7, device=device), inputs(device=device)
    eager = results(ops.additive_scores, tensors, upstream, torch.float32)
    graph = results(compiled, tensors, upstream, torch.float32)
    assert all(torch.equal(graph[name], eager[name]) for name in NAMES)


def test_autocast_keeps_fp32(device) -> None:
    query, keys, v = inputs(device=device)
    expected = ops.additive_scores(query.bfloat16(), keys.bfloat16(), v)
    with torch.autocast(device, torch.bfloat16):
        found = ops.additive_scores(query.bfloat16(), keys.bfloat16(), v)
    assert torch.equal(found, expected)


def test_a_second_derivative_raises_clearly() -> None:
    query, keys, v = (x.requires_grad_() for x in inputs())
    (gradient,) = torch.autograd.grad(
        ops.additive_scores(query, keys, v).square().sum(), query, create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"fastbert\.reference"):
        gradient.sum().backward()


@pytest.mark.parametrize("shape", [(0, 5, 7, 13), (3, 0, 7, 13), (3, 5, 0, 13), (3, 5, 7, 0)])
def test_empty_tensors(shape) -> None:
    tensors = [x.requires_grad_() for x in inputs(*shape)]
    scores = ops.additive_scores(*tensors)
    assert torch.equal(scores, torch.zeros(shape[:3]))
    scores.sum().backward()
    assert not any(x.grad.any() for x in tensors)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"query": torch.ones(2, 3)},
            ValueError,
            r"query: got shape \(2, 3\), allowed: \(B, Lq, N",
        ),
        ({"keys": torch.ones(2, 3)}, ValueError, r"keys: got shape \(2, 3\), allowed: \(B, Lk, N"),
        ({"keys": torch.ones(2, 4, 5)}, ValueError, r"keys: got .* allowed: \(2, 4, 6\)"),
        ({"keys": torch.ones(2, 4, 6).half()}, ValueError, "keys: got torch.float16, allowed: tor"),
        ({"keys": torch.ones(2, 4, 6, device="meta")}, ValueError, "keys: got device meta, allow"),
        ({"v": torch.ones(6, 1)}, ValueError, r"v: got shape \(6, 1\), allowed: \(6,\)"),
        ({"v": torch.ones(6).long()}, TypeError, "v: got torch.int64, allowed: a floating dtype"),
    ],
)
def test_wrong_arguments_are_named(changes, error, message) -> None:
    good = {"query": torch.ones(2, 3, 6), "keys": torch.ones(2, 4, 6), "v": torch.ones(6)}
    with pytest.raises(error, match=f"^{message}"):
        ops.additive_scores(**{**good, **changes})
