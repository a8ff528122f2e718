"""feed_forward has right gradients, saves few tensors and launches few kernels on every backend."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fastbert import ops, reference
from fastbert.activations import ACTIVATIONS
from fastbert.ops import backend as backends
from fastbert.ops.feed_forward import (
    _feed_forward_backward_forward,
    _feed_forward_forward,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# On Triton, these operators (library GEMMs and views) may run in addition to Triton kernels.
LIBRARY = {"aten::mm", "aten::addmm", "aten::t", "aten::transpose"}
ALLOCATION = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::fill_"}
VIEWS = {"aten::view", "aten::select", "aten::unsqueeze", "aten::detach", "aten::alias"}


def serving(activation: str) -> list[str]:
    request = backends.Request(DEVICE, torch.float32, activation=activation)
    return [b for b in backends.BACKENDS if backends.refusal("feed_forward", b, request) is None]


PAIRS = [(b, a) for a in ACTIVATIONS for b in serving(a)]


def draw(activation: str, dtype=torch.float32, rows=9, hidden=12, inner=10):
    first = 2 * inner if ACTIVATIONS[activation].gated else inner
    shapes = ((rows, hidden), (first, hidden), (first,), (hidden, inner), (hidden,))
    return [torch.randn(s, dtype=dtype, device=DEVICE, requires_grad=True) for s in shapes]


def gradients(function, leaves, seed=1):
    y = function(*leaves)
    generator = torch.Generator().manual_seed(seed)
    dy = torch.randn(y.shape, generator=generator, dtype=y.dtype).to(y.device)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def same(actual, expected):
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def saved_by(function, leaves) -> list[torch.Tensor]:
    """Return the tensors that autograd saves for the backward, except the leaves themselves."""
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks:
        function(*leaves)
    arguments = {leaf.data_ptr() for leaf in leaves}
    return [t for t in kept if t.data_ptr() not in arguments]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_closed_form_is_the_derivative_of_the_reference(activation, recompute):
    options = {"activation": activation, "recompute": recompute}
    leaves = draw(activation, torch.float64)
    expected = gradients(functools.partial(reference.feed_forward, **options), leaves)
    actual = gradients(functools.partial(ops.feed_forward, **options, backend="reference"), leaves)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("backend", "activation"), PAIRS)
def test_the_preactivation_is_all_that_is_saved(backend, activation):
    leaves = draw(activation)
    options = {"activation": activation, "backend": backend}
    (kept,) = saved_by(functools.partial(ops.feed_forward, **options), leaves)
    assert kept.shape == (9, leaves[1].shape[0])
    recomputing = functools.partial(ops.feed_forward, **options, recompute=True)
    assert saved_by(recomputing, leaves) == []
    for got, want in zip(
        gradients(recomputing, leaves),
        gradients(functools.partial(ops.feed_forward, **options), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("backend", serving("geglu"))
def test_under_checkpointing_and_compiled(backend, recompute):
    function = functools.partial(
        ops.feed_forward, activation="geglu", recompute=recompute, backend=backend
    )

    def checkpointed(*leaves):
        return checkpoint(function, *leaves, use_reentrant=False)

    leaves = draw("geglu")
    eager = gradients(function, leaves)
    same(gradients(checkpointed, leaves), eager)
    compiled = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")
    same(gradients(compiled, leaves), eager)


@pytest.mark.parametrize("backend", serving("gelu"))
def test_only_wanted_gradients_are_formed(backend):
    leaves = draw("gelu")
    full = gradients(functools.partial(ops.feed_forward, backend=backend), leaves)
    for wanted in range(5):
        alone = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(leaves)]
        y = ops.feed_forward(*alone, backend=backend)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        (gradient,) = torch.autograd.grad(y, alone[wanted], dy)
        torch.testing.assert_close(gradient, full[1 + wanted])


@pytest.mark.parametrize("backend", serving("gelu"))
def test_a_residuals_gradient_is_added_to_that_of_x(backend):
    x, w1, b1, w2, b2 = (t.detach() for t in draw("gelu"))
    dy, dresidual = torch.randn_like(x), torch.randn_like(x)
    needs = [True] * 5
    for save in (False, True):
        _, h = _feed_forward_forward(x, w1, b1, w2, b2, "gelu", save, backend)
        saved = (dy, x, w1, b1, w2, b2, h if save else None)
        alone, together = (
            _feed_forward_backward_forward(*saved, residual, "gelu", needs, backend)
            for residual in (None, dresidual)
        )
        torch.testing.assert_close(together[0], alone[0] + dresidual)
        same(together[1:], alone[1:])


class Recorder(TorchDispatchMode):
    """Record the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif("triton" not in serving("geglu"), reason="Triton does not run here")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_launches_nothing_but_its_kernels_and_library_products(
    activation, dtype, monkeypatch
):
    from fastbert.kernels.launch import Launch

    # The test runs no kernel, because the interpreter would copy arguments with torch operators.
    monkeypatch.setattr(Launch, "run", lambda self, on: None)
    leaves = [t.detach() for t in draw(activation, dtype)]
    with Recorder() as recorder:
        _, h = _feed_forward_forward(*leaves, activation, True, "triton")
        arguments = (torch.empty_like(leaves[0]), *leaves)
        for saved in (h, None):
            _feed_forward_backward_forward(
                *arguments, saved, None, activation, [True] * 5, "triton"
            )
    assert recorder.names - LIBRARY - ALLOCATION - VIEWS == set()


@pytest.mark.skipif(backends.unavailable("cuda", DEVICE) is not None, reason="no CUDA here")
def test_the_cuda_extension_refuses_what_it_has_no_kernels_for():
    for activation in ("relu", "geglu", "swiglu"):
        with pytest.raises(ValueError, match=f"GELU kernels only, none for {activation}"):
            ops.feed_forward(*draw(activation), activation=activation, backend="cuda")


def test_gated_weights_have_two_halves():
    x, w1, b1, w2, b2 = draw("geglu")
    with pytest.raises(ValueError, match=r"^w1: got shape \(19, 12\), allowed: an even number"):
        ops.feed_forward(x, w1[1:], b1[1:], w2, b2, activation="geglu")
    with pytest.raises(ValueError, match=r"^w2: got shape \(12, 20\), allowed: \(12, 10\)"):
        ops.feed_forward(x, w1, b1, torch.cat([w2, w2], 1), b2, activation="geglu")
