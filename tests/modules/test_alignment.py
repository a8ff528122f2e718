"""Each alignment score is its formula in float64, with the gradients of all inputs."""

from __future__ import annotations

import copy
import importlib
import math
import pickle

import plain_alignment
import pytest
import torch
from _largest_tensor import largest_tensor
from plain_alignment import SCORES
from torch import Tensor

from fastbert.modules import alignment
from fastbert.ops import backend as backends
from fastbert.testing.compare import compare_all
from fastbert.testing.yardstick import Yardstick

LENGTHS = (19, 8, 0)
QUERIES = 12
LOCAL = {
    "global": lambda size: None,
    "monotonic": lambda size: alignment.Monotonic(2),
    "predictive": lambda size: alignment.Predictive(size, 3, 6),
}
NAMES = ("output", "weights", "query", "keys", "values")


def mask_of(lengths=LENGTHS, device="cpu") -> Tensor:
    places = torch.arange(max(lengths), device=device)
    return places < torch.tensor(lengths, device=device).unsqueeze(1)


def inputs(query: int, key: int, value: int, dtype=torch.float32, device="cpu") -> list[Tensor]:
    batch, keys = len(LENGTHS), max(LENGTHS)
    shapes = ((batch, QUERIES, query), (batch, keys, key), (batch, keys, value))
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def results(run, parameters, tensors, upstream, dtype) -> dict[str, Tensor]:
    """Return output, weights, and the gradients of the inputs and parameters, all in `dtype`."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    weights = {name: x.detach().to(dtype).requires_grad_() for name, x in parameters.items()}
    found = run(weights, *leaves)
    total = sum((x * up.to(dtype)).sum() for x, up in zip(found, upstream, strict=True))
    gradients = torch.autograd.grad(total, [*leaves, *weights.values()], allow_unused=True)
    everything = dict(zip((*NAMES, *weights), (*found, *gradients), strict=True))
    return {name: x for name, x in everything.items() if x is not None}


def check(module, name, tensors, dtype, local=None, lengths=LENGTHS) -> None:
    """Compare a module with the formula `name` by the tolerance rule."""
    device = tensors[0].device
    module = module.to(device, dtype)
    parameters = dict(module.named_parameters())
    shape = (len(lengths), QUERIES, max(lengths))
    upstream = [torch.randn(*shape[:2], tensors[2].shape[-1]), torch.randn(shape)]
    upstream = [x.to(device, dtype) for x in upstream]
    mask = mask_of(lengths, device)

    def ours(weights, query, keys, values):
        return torch.func.functional_call(module, dict(weights), (query, keys, values, mask))

    def plain(weights, query, keys, values):
        return plain_alignment.attend(name, weights, query, keys, values, lengths, local)

    actual = results(ours, parameters, tensors, upstream, dtype)
    oracle = results(plain, parameters, tensors, upstream, torch.float64)
    yardstick = Yardstick(lambda: results(plain, parameters, tensors, upstream, dtype))
    assert actual.keys() == oracle.keys()
    for comparison in compare_all(actual, oracle, yardstick):
        assert comparison.passed, f"{name}: {comparison}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", LOCAL)
@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_its_formula(name, where, dtype, device) -> None:
    same = name not in ("additive", "location-based", "general")
    sizes = (16, 16, 16) if same else (12, 16, 16)
    local = LOCAL[where](sizes[0])
    if where == "predictive" and dtype == torch.bfloat16:
        # In bf16, the rounded centre could move a key over the edge of a smaller window.
        local = alignment.Predictive(sizes[0], 2 * max(LENGTHS), 6)
    module = SCORES[name][1](*sizes[:2], local=local)
    check(module, name, inputs(*sizes, dtype, device), dtype, local)


@pytest.mark.parametrize("backend", ["reference", "triton", "cpu"])
@pytest.mark.parametrize("name", ["general", "additive"])
def test_a_score_is_its_formula_on_each_backend(name, backend, device) -> None:
    if backends.refusal("attention", backend, backends.Request(device, torch.float32)):
        pytest.skip(f"{backend} cannot run here")
    module = SCORES[name][1](12, 16, backend=backend)
    assert module.backend == backend
    check(module, name, inputs(12, 16, 16, device=device), torch.float32)


@pytest.mark.parametrize("sizes", [(8, 8, 20), (300, 300, 300), (8, 8, 300)], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_every_width_of_values_and_operands_is_served(name, sizes, device) -> None:
    check(SCORES[name][1](*sizes[:2]), name, inputs(*sizes, device=device), torch.float32)


@pytest.mark.parametrize("name", SCORES)
def test_float64_is_computed_in_float64(name) -> None:
    tensors = inputs(8, 8, 8, torch.float64)
    module = SCORES[name][1](8, 8).double()
    with torch.no_grad():
        found = module(*tensors, mask_of())
        expected = plain_alignment.attend(name, dict(module.named_parameters()), *tensors, LENGTHS)
    for ours, plain in zip(found, expected, strict=True):
        assert ours.dtype == torch.float64
        assert float((ours - plain).abs().max()) < 1e-13


@pytest.mark.parametrize("size", [8, 300])
@pytest.mark.parametrize("attend", ["soft", "hard"])
@pytest.mark.parametrize("where", LOCAL)
@pytest.mark.parametrize("name", SCORES)
def test_what_no_query_attends_to_has_no_effect(name, where, attend, size, device) -> None:
    """The keys and values of padding may be NaN, and a query without keys has exactly 0."""
    module = SCORES[name][1](size, size, attend=attend, local=LOCAL[where](size))
    module = module.to(device).eval()
    clean, mask = inputs(size, size, size, device=device), mask_of(device=device)
    runs = []
    for fill in (0.0, math.nan, math.inf):
        leaves = [x.clone() for x in clean]
        for x in leaves[1:]:
            x[~mask] = fill
        leaves = [x.requires_grad_() for x in leaves]
        options = {"return_log_probability": True} if attend == "hard" else {}
        found = module(*leaves, mask, **options)
        sum(x.sum() for x in found).backward()
        assert not leaves[0].grad[2].any()
        for x in leaves[1:]:
            assert x.grad is None or not x.grad[~mask].any()
        assert not any(x[2].any() for x in found)
        runs.append([*found, *(x.grad for x in leaves if x.grad is not None)])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("where", LOCAL)
@pytest.mark.parametrize("name", SCORES)
def test_padding_on_either_side_changes_nothing(name, where) -> None:
    module = SCORES[name][1](8, 8, local=LOCAL[where](8)).double()
    query, keys, values = (x[:1] for x in inputs(8, 8, 8, torch.float64))
    alone, count = module(query, keys, values), keys.shape[1]
    sides = [(0, 3)] if name == "location-based" else [(0, 3), (3, 0), (2, 1)]
    for left, right in sides:
        padded = [torch.nn.functional.pad(x, (0, 0, left, right)) for x in (keys, values)]
        mask = torch.zeros(1, left + count + right, dtype=torch.bool)
        mask[:, left : left + count] = True
        output, weights = module(query, *padded, mask)
        torch.testing.assert_close(output, alone[0], rtol=1e-12, atol=1e-12)
        inside = weights[:, :, left : left + count]
        torch.testing.assert_close(inside, alone[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("where", LOCAL)
@pytest.mark.parametrize(
    "shape", [(3, 19), (3, 1, 19), (1, 12, 19), (3, 12, 19), (3, 12, 1), (19,), ()], ids=str
)
def test_a_mask_is_broadcast(shape, where) -> None:
    module, tensors = alignment.Dot(local=LOCAL[where](8)), inputs(8, 8, 8)
    mask = torch.rand(shape) > 0.4
    full = (mask.unsqueeze(1) if len(shape) == 2 else mask).expand(3, 12, 19)
    assert all(map(torch.equal, module(*tensors, mask), module(*tensors, full)))


@pytest.mark.parametrize("name", SCORES)
def test_nothing_to_attend(name) -> None:
    module = SCORES[name][1](8, 8)
    for batch, rows, columns in ((0, 2, 3), (2, 0, 3), (2, 3, 0)):
        query, keys = (
            torch.randn(batch, rows, 8, requires_grad=True),
            torch.randn(batch, columns, 8),
        )
        output, weights = module(query, keys, keys)
        assert weights.shape == (batch, rows, columns)
        assert torch.equal(output, torch.zeros(batch, rows, 8))
        output.sum().backward()


@pytest.mark.each_value
@pytest.mark.parametrize("where", LOCAL)
@pytest.mark.parametrize("name", ["content-based", "additive", "location-based"])
def test_whole_graph(name, where) -> None:
    module, tensors = SCORES[name][1](8, 8, local=LOCAL[where](8)), inputs(8, 8, 8)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(*tensors, mask_of()), module(*tensors, mask_of())))


@pytest.mark.parametrize("attend", ["soft", "hard"])
@pytest.mark.parametrize("where", LOCAL)
@pytest.mark.parametrize("name", SCORES)
def test_autocast(name, where, attend, device) -> None:
    module = SCORES[name][1](8, 8, attend=attend, local=LOCAL[where](8)).to(device)
    tensors = [x.requires_grad_() for x in inputs(8, 8, 8, device=device)]
    options = {"return_log_probability": True} if attend == "hard" else {}
    with torch.autocast(device, torch.bfloat16):
        output, weights, *rest = module(*tensors, mask_of(device=device), **options)
    assert output.dtype == weights.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in rest)
    sum(x.float().sum() for x in (output, weights, *rest) if x.requires_grad).backward()
    for x in (*tensors, *module.parameters()):
        assert x.grad is None or (x.grad.dtype == torch.float32 and x.grad.isfinite().all())


@pytest.mark.parametrize("name", ["additive", "location-based"])
def test_no_tensor_has_an_element_for_each_pair_and_column(name, monkeypatch) -> None:
    monkeypatch.setattr(importlib.import_module("fastbert.ops.additive_scores"), "CPU_BLOCK", 2000)
    rows, columns, width = 40, 50, 64
    module = {
        "additive": lambda: alignment.Additive(width, width, width),
        "location-based": lambda: alignment.LocationBased(width, columns),
    }[name]()
    query = torch.randn(1, rows, width, requires_grad=True)
    keys = torch.randn(1, columns, width, requires_grad=True)
    with largest_tensor() as largest:
        output, weights = module(query, keys, keys)
        (output.sum() + weights.square().sum()).backward()
    allowed = (width * width, columns * width, rows * columns)
    assert rows * columns <= largest.elements <= max(allowed)


def test_a_module_is_copied_pickled_and_loaded() -> None:
    first = alignment.Additive(8, 8, 4, local=alignment.Predictive(8, 2))
    tensors = inputs(8, 8, 8)
    loaded = alignment.Additive(8, 8, 4, local=alignment.Predictive(8, 2))
    loaded.load_state_dict(first.state_dict())
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first)), loaded):
        assert all(map(torch.equal, other(*tensors), first(*tensors)))


def test_content_based_attention_with_rows_of_zeros() -> None:
    module = alignment.ContentBased()
    for dtype in (torch.float32, torch.float16):
        query = torch.zeros(1, 2, 8, dtype=dtype, requires_grad=True)
        output, weights = module(
            query, torch.zeros(1, 4, 8, dtype=dtype), torch.ones(1, 4, 8).to(dtype)
        )
        assert torch.equal(weights, torch.full((1, 2, 4), 0.25, dtype=dtype))
        output.sum().backward()
        assert query.grad.isfinite().all()


def dot(**options):
    return alignment.Dot(**options)


def call(module=None, **changes):
    """Call a module with good arguments, except for `changes`."""
    good = {
        "query": torch.ones(2, 3, 8),
        "keys": torch.ones(2, 5, 8),
        "values": torch.ones(2, 5, 6),
    }
    return (module or dot())(**{**good, **changes})


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: dot(attend="sharp"), ValueError, "attend: got 'sharp', allowed: soft, hard"),
        (lambda: dot(local=3), TypeError, "local: got int, allowed: Monotonic, Predictive"),
        (lambda: dot(backend="gpu"), ValueError, "backend: got 'gpu', allowed: None, reference"),
        (lambda: alignment.Additive(8, 0, 4), ValueError, "key_size: got 0, allowed: an integer"),
        (lambda: alignment.Additive(8, 8, 1.5), ValueError, "hidden_size: got 1.5, allowed: an in"),
        (lambda: alignment.LocationBased(8, 0), ValueError, "max_keys: got 0, allowed: an integer"),
        (lambda: alignment.ContentBased(strength=0), ValueError, "strength: got 0, allowed: a fin"),
        (lambda: alignment.Monotonic(-1), ValueError, "window: got -1, allowed: an integer >= 0"),
        (lambda: alignment.Predictive(8, 0), ValueError, "window: got 0, allowed: an integer >= 1"),
        (lambda: alignment.Reinforce(1.0), ValueError, r"decay: got 1.0, allowed: a number in \[0"),
        (lambda: call(query=torch.ones(2, 8)), ValueError, r"query: got shape \(2, 8\), allowed: "),
        (lambda: call(query=torch.ones(2, 3, 8).long()), TypeError, "query: got torch.int64, allo"),
        (lambda: call(keys=torch.ones(2, 5, 7)), ValueError, r"keys: got .* allowed: \(2, Lk, 8\)"),
        (lambda: call(keys=torch.ones(3, 5, 8)), ValueError, r"keys: got shape \(3, 5, 8\), allow"),
        (lambda: call(keys=torch.ones(2, 5, 8).double()), ValueError, "keys: got torch.float64, a"),
        (lambda: call(keys=torch.ones(2, 5, 8, device="meta")), ValueError, "keys: got device met"),
        (lambda: call(values=torch.ones(2, 4, 6)), ValueError, r"values: got .* \(2, 5, Dv\), wit"),
        (lambda: call(mask=torch.ones(2, 5)), TypeError, "mask: got torch.float32, allowed: bool"),
        (
            lambda: call(mask=torch.ones(2, 4).bool()),
            ValueError,
            r"mask: got shape \(2, 4\), allowed: \(B, Lk\) = \(2, 5\) or broadcastable to \(2, 3",
        ),
        (lambda: call(mask=torch.ones(1, 2, 3, 5).bool()), ValueError, "mask: got shape"),
        (lambda: call(return_log_probability=True), ValueError, "return_log_probability: got True"),
        (
            lambda: call(alignment.General(7, 8)),
            ValueError,
            r"query: got shape \(2, 3, 8\), allowed: \(B, Lq, 7\)",
        ),
        (
            lambda: call(alignment.Additive(8, 9, 4)),
            ValueError,
            r"keys: got shape \(2, 5, 8\), allowed: \(2, Lk, 9\)",
        ),
        (
            lambda: call(alignment.LocationBased(8, 4)),
            ValueError,
            "keys: got 5 keys, allowed: at most max_keys=4",
        ),
        (
            lambda: call(dot(local=alignment.Predictive(7, 2))),
            ValueError,
            r"query: got shape \(2, 3, 8\), allowed: \(B, Lq, 7\)",
        ),
        (
            lambda: call(dot(local=alignment.Monotonic(2)), first_position=-1),
            ValueError,
            "first_position: got -1, allowed: an integer >= 0",
        ),
        (
            lambda: call(dot(attend="hard"), keys=torch.ones(2, 0, 8), values=torch.ones(2, 0, 6)),
            ValueError,
            "keys: got no keys, allowed: at least one key",
        ),
    ],
)
def test_wrong_arguments_are_named(wrong, error, message) -> None:
    with pytest.raises(error, match=f"^{message}"):
        wrong()
