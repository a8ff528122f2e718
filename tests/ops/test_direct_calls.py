"""Direct calls of operators have the bits of dispatched calls, which are made under a mode."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastbert import ops
from fastbert.ops import backend as backends
from fastbert.ops.register import OPERATORS

WIDTH = 32


class Seen(TorchDispatchMode):
    """A dispatch mode that records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    """A tensor subclass that records the names of the operators that run on it."""

    names: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.names.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, WIDTH, generator=generator).requires_grad_() for _ in range(2)]


def call(name, x, residual):
    weight = torch.linspace(0.5, 1.5, WIDTH)
    square = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH)
    if name == "layer_norm":
        return ops.layer_norm(x, weight, weight, residual=residual, x_bias=weight)
    if name == "rms_norm":
        return ops.rms_norm(x, weight, residual=residual)
    if name == "linear":
        return ops.linear(x, square, weight) + residual
    if name == "feed_forward":
        return ops.feed_forward(x, square, weight, square, weight) + residual
    qkv = torch.stack([x, residual, x + residual], 1).view(6, 3, 2, WIDTH // 2)
    return ops.attention_qkvpacked(qkv, torch.tensor([0, 2, 6], dtype=torch.int32), 4)


NAMES = ("layer_norm", "rms_norm", "linear", "feed_forward", "attention_qkvpacked")


@pytest.fixture
def dispatched(monkeypatch):
    """Return a list that collects the operators that are called through the dispatcher."""
    names = []
    for name in NAMES:
        operator = OPERATORS[name]

        def record(*arguments, name=name, overload=operator.overload):
            names.append(name)
            return overload(*arguments)

        monkeypatch.setattr(operator, "overload", record)
    return names


@pytest.mark.parametrize("name", NAMES)
def test_both_ways_give_the_same_bits(name, dispatched):
    results = []
    for mode in (None, Seen()):
        x, residual = inputs()
        if mode is None:
            out = call(name, x, residual)
            assert not dispatched
        else:
            with mode:
                out = call(name, x, residual)
            assert dispatched == [name]
            assert f"fastbert::{name}" in mode.names
        gradients = torch.autograd.grad(out, (x, residual), torch.ones_like(out))
        results.append((out, *gradients))
    for direct, other in zip(*results, strict=True):
        assert torch.equal(direct, other)


def test_a_profiler_sees_operators(dispatched):
    with torch.profiler.profile() as profile:
        call("layer_norm", *inputs())
    assert dispatched == ["layer_norm"]
    assert "fastbert::layer_norm" in {event.name for event in profile.events()}


def test_fake_tensors_stay_fake(dispatched):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, residual = (mode.from_tensor(x.detach()) for x in inputs())
    out = call("layer_norm", x, residual)
    assert type(out) is type(x)
    assert dispatched == ["layer_norm"]


def test_a_subclass_sees_operators(dispatched):
    x, residual = inputs()
    call("layer_norm", x.detach().as_subclass(Own), residual)
    assert dispatched == ["layer_norm"]


def test_a_second_derivative_is_an_error():
    x, residual = inputs()
    out = call("layer_norm", x, residual)
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="layer_norm_backward has no derivative"):
        dx.sum().backward()


def test_a_kept_choice_follows_its_reasons(monkeypatch):
    request = backends.Request("cpu", torch.float32)
    first = backends.resolve("layer_norm", None, request).backend
    monkeypatch.setattr(backends, "DEFAULT_REQUEST", "reference")
    assert backends.resolve("layer_norm", None, request) == ("reference", "asked for")
    monkeypatch.setattr(backends, "DEFAULT_REQUEST", None)
    assert backends.resolve("layer_norm", None, request).backend == first
    monkeypatch.setattr(backends, "EXTENSION", None)
    monkeypatch.setattr(backends, "EXTENSION_STATE", "no compiler here")
    assert backends.resolve("layer_norm", None, request).backend == "reference"
    row = backends.TABLES["layer_norm"]["reference"]
    refusing = backends.Implementation(row.forward, row.backward, refuses=lambda _: "never")
    monkeypatch.setitem(backends.TABLES["layer_norm"], "reference", refusing)
    with pytest.raises(ValueError, match="never"):
        backends.resolve("layer_norm", None, request)


def test_indices_of_a_device_are_those_of_the_reference():
    from fastbert import reference
    from fastbert.ops.varlen import _unpad_indices_of_device

    generator = torch.Generator().manual_seed(1)
    masks = [torch.rand(5, 7, generator=generator) < p for p in (0.0, 0.2, 0.8, 1.0)]
    masks.append(torch.tensor([[False, True], [False, False], [True, True]]))
    for mask in masks:
        expected = reference.unpad(mask, mask)
        indices, cu_seqlens, longest = _unpad_indices_of_device(mask)
        assert torch.equal(indices, expected.indices)
        assert torch.equal(cu_seqlens, expected.cu_seqlens)
        assert cu_seqlens.dtype == torch.int32
        assert longest == expected.max_seqlen
