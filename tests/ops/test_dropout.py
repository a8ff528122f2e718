"""Every backend drops the same elements of a tensor as the reference, also in the backward."""

from __future__ import annotations

import pytest
import torch

from fastbert import reference
from fastbert.ops import backend as backends
from fastbert.ops.dropout import dropout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REQUEST = backends.Request(DEVICE, torch.float32)
SERVING = [
    name for name in backends.BACKENDS if backends.refusal("embedding", name, REQUEST) is None
]
SEED = torch.tensor([-7], dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("backend", SERVING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 64), (2, 3, 37), (1, 1), (0, 8)], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.9, 1.0])
def test_the_mask_is_that_of_the_reference(backend, dtype, shape, dropout_p):
    x = torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()
    dy = torch.randn(shape, device=DEVICE).to(dtype)
    results = []
    rows = (x.numel() // shape[-1], shape[-1])
    for y in (
        dropout(x, dropout_p, dropout_seed=SEED, backend=backend),
        reference.dropout(x, dropout_p, SEED, rows),
    ):
        results.append((y, *torch.autograd.grad(y, x, dy)))
    for ours, exact in zip(*results, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, exact)


def test_a_mask_differs_per_call_and_repeats_from_a_seed():
    x = torch.ones(64, 64, device=DEVICE)
    torch.manual_seed(3)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(dropout(x, 0.5), first)
    assert not torch.equal(first, second)


def test_backends_that_compute_no_mask_are_passed_over():
    x = torch.ones(8, 8, dtype=torch.float64, device=DEVICE)
    expected = reference.dropout(x, 0.5, SEED, (8, 8))
    assert torch.equal(dropout(x, 0.5, dropout_seed=SEED), expected)
    assert torch.equal(dropout(x, 0.5, dropout_seed=SEED, backend="cuda"), expected)


def test_a_compiled_graph_draws_the_same_mask():
    x = torch.randn(8, 40, device=DEVICE)
    compiled = torch.compile(
        lambda x: dropout(x, 0.5, dropout_seed=SEED), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x), dropout(x, 0.5, dropout_seed=SEED))


@pytest.mark.parametrize("dropout_p", [-0.1, 1.5])
def test_a_wrong_probability_is_refused(dropout_p):
    with pytest.raises(ValueError, match="dropout_p: got"):
        dropout(torch.ones(2, 2), dropout_p)
