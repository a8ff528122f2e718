"""``JoinedLinear`` agrees with the linear layers that it joins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert.modules.joined_linear import JoinedLinear
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

SIZE, ROWS = 48, 21


def parts(bias: tuple[bool, ...] = (True, True, True)) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(SIZE, SIZE, bias=has) for has in bias]


def one_by_one(layers: Any, x: Tensor) -> Tensor:
    return torch.cat([layer(x) for layer in layers], -1)


BIASES = [(True, True, True), (False, False, False), (True, False, True)]


def whole(layers: Any, x: Tensor) -> Tensor:
    """Compute the layers as one product with joined weights, so the gradient of x is one sum."""
    biases = [torch.zeros(SIZE) if layer.bias is None else layer.bias for layer in layers]
    return F.linear(x, torch.cat([layer.weight for layer in layers]), torch.cat(biases))


@pytest.mark.parametrize("bias", BIASES, ids=str)
def test_values_and_gradients(bias) -> None:
    x, slope = torch.randn(ROWS, SIZE), torch.randn(ROWS, 3 * SIZE)
    joined = JoinedLinear(parts(bias))

    def run(module, function, dtype=torch.float32):
        module.zero_grad()
        given = x.to(dtype).clone().requires_grad_()
        y = function(given)
        (y * slope).sum().backward()
        slopes = {name.removeprefix("parts."): p.grad for name, p in module.named_parameters()}
        return {"y": y.detach(), "x": given.grad, **slopes}

    double, single = nn.ModuleList(parts(bias)).double(), nn.ModuleList(parts(bias))
    actual = run(joined, joined)
    oracle = run(double, lambda given: one_by_one(double, given), torch.float64)
    yardstick = Yardstick(lambda: run(single, lambda given: whole(single, given)))
    assert list(actual) == list(oracle)
    for name in oracle:
        assert_close(name, actual[name], oracle[name], yardstick[name])


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_reads_the_parts_without_joining_them(dtype, residual) -> None:
    """Autograd saves no tensor as large as all joined weights, with and without autocast."""
    joined, kept = JoinedLinear(parts()), []

    def run(layers: Any, given: Tensor, call: Any) -> dict[str, Tensor]:
        layers.zero_grad()
        given = given.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
            y = call(given)
        (y.sin().sum() + (given.cos().sum() if residual else 0.0)).backward()
        results = {name.removeprefix("parts."): p.grad for name, p in layers.named_parameters()}
        return {"y": y.detach(), "x": given.grad, **results}

    def call(given: Tensor) -> Tensor:
        if not residual:
            return joined(given)
        y, same = joined(given, return_residual=True)
        assert same.data_ptr() == given.data_ptr()
        return y

    def keep(t: Tensor) -> Tensor:
        kept.append(t.shape)
        return t

    x = torch.randn(ROWS, SIZE)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        actual = run(joined, x, call)
    assert (SIZE, SIZE) in kept
    assert not [shape for shape in kept if shape[:1] == (3 * SIZE,)]
    double, single = nn.ModuleList(parts()).double(), nn.ModuleList(parts())
    oracle = run(double, x.double(), lambda given: one_by_one(double, given))
    yardstick = Yardstick(lambda: run(single, x, lambda given: whole(single, given)))
    for name in oracle:
        assert_close(name, actual[name], oracle[name], yardstick[name])


@pytest.mark.parametrize("bias", BIASES, ids=str)
def test_inference(bias) -> None:
    layers = parts(bias)
    joined, x = JoinedLinear(layers), torch.randn(ROWS, SIZE)
    with torch.no_grad():
        y, residual = joined(x, return_residual=True)
        assert torch.equal(y, joined(x))
        assert residual is x
        yardstick = Yardstick(lambda: one_by_one(layers, x))
        assert_close("y", y, one_by_one(nn.ModuleList(parts(bias)).double(), x.double()), yardstick)


@pytest.mark.parametrize("bias", BIASES, ids=str)
def test_weights_and_biases_are_those_of_the_parts(bias) -> None:
    joined = JoinedLinear(parts(bias))
    weights, biases = joined.weights_and_biases()
    assert all(w is part.weight for w, part in zip(weights, joined.parts, strict=True))
    assert torch.equal(joined.weight, torch.cat(weights))
    if not any(bias):
        assert biases is None
        assert joined.bias is None
        return
    for has, given, part in zip(bias, biases, joined.parts, strict=True):
        assert given is part.bias if has else not given.any()
    assert torch.equal(joined.bias, torch.cat(biases))


@pytest.mark.parametrize("grad", [False, True])
def test_calls_keep_nothing(grad) -> None:
    joined, x = JoinedLinear(parts()), torch.randn(ROWS, SIZE)
    before = set(vars(joined))
    with torch.set_grad_enabled(grad):
        joined(x)
    assert set(vars(joined)) == before
    assert set(joined.state_dict()) == {
        f"parts.{i}.{name}" for i in range(3) for name in ("weight", "bias")
    }


def _first(joined: JoinedLinear) -> Any:
    return joined.parts[0]


CHANGES = {
    "in place": lambda j: _first(j).weight.mul_(2.0),
    "in place, bias": lambda j: _first(j).bias.add_(1.0),
    "data in place": lambda j: _first(j).weight.data.mul_(2.0),
    "data copied": lambda j: j.parts[2].weight.data.copy_(torch.randn(SIZE, SIZE)),
    "one element": lambda j: j.parts[2].weight.data[-1, -1].add_(1.0),
    "data replaced": lambda j: setattr(j.parts[1].weight, "data", torch.randn(SIZE, SIZE)),
    "parameter replaced": lambda j: setattr(
        _first(j), "weight", nn.Parameter(torch.randn(SIZE, SIZE))
    ),
    "bias gone": lambda j: setattr(_first(j), "bias", None),
    "all biases gone": lambda j: [setattr(part, "bias", None) for part in j.parts],
    "part replaced": lambda j: j.parts.__setitem__(1, nn.Linear(SIZE, SIZE)),
    "loaded": lambda j: j.load_state_dict(
        JoinedLinear([nn.Linear(SIZE, SIZE) for _ in range(3)]).state_dict()
    ),
    "another dtype": lambda j: j.to(torch.bfloat16),
    "a view of numpy": lambda j: _first(j).weight.detach().numpy().__imul__(2.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change) -> None:
    joined, x = JoinedLinear(parts()), torch.randn(ROWS, SIZE)
    with torch.no_grad():
        before = joined(x)
        CHANGES[change](joined)
        x = x.to(joined.parts[0].weight.dtype)
        after = joined(x)
        fresh = JoinedLinear(list(joined.parts))(x)
    assert torch.equal(after, fresh)
    assert after.dtype == x.dtype
    assert not torch.equal(after.float(), before)
    wanted = one_by_one(joined.parts, x).float()
    torch.testing.assert_close(after.float(), wanted, atol=0.05, rtol=0.02)


class Adapted(nn.Module):
    """A module that, like an adapter, wraps a linear layer and exposes that layer's weights."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.weight, self.bias = inner, inner.weight, inner.bias

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * self.inner(x)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("grad", [False, True])
def test_a_part_with_hooks_or_of_another_class_is_called(number, grad) -> None:
    joined, x, fired = JoinedLinear(parts()), torch.randn(ROWS, SIZE), []
    with torch.set_grad_enabled(grad):
        expected = joined(x)
        part = joined.parts[number]
        for register in (part.register_forward_hook, part.register_forward_pre_hook):
            handle = register(lambda *_: fired.append(number))
            y, residual = joined(x, return_residual=True)
            assert residual is x
            torch.testing.assert_close(y, expected)
            handle.remove()
        joined(x)
        assert fired == [number] * 2
        columns = slice(number * SIZE, (number + 1) * SIZE)
        joined.parts[number] = Adapted(part)
        expected[:, columns] *= 2.0
        torch.testing.assert_close(joined(x), expected)
        joined.parts[number] = part
        part.forward = lambda x: torch.zeros_like(x)
        assert not joined(x)[:, columns].any()


def test_frozen_parts_get_no_gradient() -> None:
    joined, x = JoinedLinear(parts()), torch.randn(ROWS, SIZE)
    joined.parts[1].requires_grad_(False)
    joined(x).square().sum().backward()
    assert joined.parts[1].weight.grad is None
    assert all(joined.parts[i].weight.grad is not None for i in (0, 2))
