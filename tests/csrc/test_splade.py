"""The C++ head of SPLADE agrees with float64, at every instruction-set level."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fastbert import reference
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("dhidden", "dweight", "dbias")
# A task has 256 classes, and the gradient of the hidden states sums 1,024 classes at a time. Both
# numbers leave an odd remainder here.
CLASSES = 1101
# A block of logits has 128 tokens: the fourth sequence is in two blocks, and the last in three.
LENGTHS = (0, 1, 60, 100, 0, 0, 37, 300, 0)


def ends_of(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def draw(lengths, depth, classes, dtype, *, slack=0):
    hidden = torch.randn(sum(lengths) + slack, depth)
    weight, bias = torch.randn(classes, depth) / depth**0.5, torch.randn(classes)
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), ends_of(*lengths)


def gradients(hidden, weight, bias, ends, dy, dtype):
    inputs = [
        t if t is None else t.detach().to(dtype).requires_grad_() for t in (hidden, weight, bias)
    ]
    y = reference.splade(*inputs, cu_seqlens=ends)
    y.backward(dy.to(dtype))
    names = zip(NAMES, inputs, strict=True)
    return {"y": y.detach(), **{n: t.grad for n, t in names if t is not None}}


def run(operators, hidden, weight, bias, ends, dy):
    y, logits, rows = operators.splade_forward(hidden, weight, bias, ends, True)
    results = operators.splade_backward(dy, hidden, weight, bias, logits, rows)
    return {"y": y, "rows": rows, **dict(zip(NAMES, results, strict=True))}


def check(operators, problem):
    hidden, ends = problem[0], problem[3]
    dy = torch.randn(len(ends) - 1, len(problem[1])).to(hidden.dtype)
    oracle = gradients(*problem, dy, torch.float64)
    yardstick = Yardstick(lambda: gradients(*problem, dy, hidden.dtype))
    actual = run(operators, *problem, dy)
    for name, expected in oracle.items():
        assert_close(f"splade {name}", actual[name], expected, yardstick[name])
    return actual


def rows_of(hidden, weight, bias, ends):
    """Return the row with the largest logit in float64, or -1 if no logit is positive."""
    logits = hidden.double() @ weight.double().t()
    logits = logits if bias is None else logits + bias.double()
    rows = torch.full((len(ends) - 1, len(weight)), -1)
    for b, (begin, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        if begin < end:
            highest, row = logits[begin:end].max(dim=0)
            rows[b] = torch.where(highest > 0, begin + row, -1)
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_float64(isa, operators, dtype):
    problem = draw(LENGTHS, 40, CLASSES, dtype, slack=3)
    results = check(operators, problem)
    assert torch.equal(results["rows"].long(), rows_of(*problem))
    assert not results["dhidden"][-3:].any()
    assert not results["y"][[0, 4, 5, 8]].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "depth", "classes"),
    [((1,), 1, 1), ((3,), 59, 3), ((5, 2), 111, 257), ((4,), 300, 70), ((130,), 64, 33)],
)
def test_odd_sizes_and_no_bias(isa, operators, lengths, depth, classes, dtype):
    hidden, weight, _, ends = draw(lengths, depth, classes, dtype)
    results = check(operators, (hidden, weight, None, ends))
    assert results["dbias"].numel() == 0


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_the_gradient_reaches_the_largest_logit_in_16_bits(isa, operators, dtype):
    """The yardstick rounds logits to 16 bits and chooses other rows, so it allows large errors.

    Here, the rows of the maxima come from float64.
    """
    problem = hidden, weight, bias, _ = draw((30, 41), 64, 301, dtype)
    dy = torch.randn(2, 301).to(dtype)

    def exact(kind):
        rows = rows_of(*problem)
        chosen = hidden.to(kind)[rows.clamp(min=0)]
        logits = (chosen * weight.to(kind)).sum(-1) + bias.to(kind)
        scale = torch.where(rows >= 0, dy.to(kind) / (1 + logits), 0.0)
        dhidden = torch.zeros(hidden.shape, dtype=kind)
        for row, each in zip(rows.clamp(min=0), scale, strict=True):
            dhidden.index_add_(0, row, each[:, None] * weight.to(kind))
        dweight = (scale[..., None] * chosen).sum(0)
        return {"dhidden": dhidden, "dweight": dweight, "dbias": scale.sum(0)}

    oracle, yardstick = exact(torch.float64), Yardstick(lambda: exact(dtype))
    actual = run(operators, *problem, dy)
    for name, expected in oracle.items():
        assert_close(f"splade {name}", actual[name], expected, yardstick[name])


def test_small_integers_are_exact(isa, operators):
    hidden = torch.randint(-3, 4, (70, 48)).float()
    weight = torch.randint(-3, 4, (300, 48)).float()
    bias = torch.randint(-3, 4, (300,)).float()
    ends = ends_of(20, 50)
    _, logits, rows = operators.splade_forward(hidden, weight, bias, ends, True)
    expected = (hidden @ weight.t() + bias).split((20, 50))
    assert torch.equal(logits, torch.stack([each.max(0).values for each in expected]))
    # The first of several equal logits is taken.
    first = torch.stack([(each == each.max(0).values).int().argmax(0) for each in expected])
    first[1] += 20
    assert torch.equal(rows, torch.where(logits > 0, first, -1).int())


def test_log1p_of_small_and_large_logits(isa, operators):
    logits = torch.cat([torch.logspace(-38, 38, 500), torch.tensor([1e-45, 0.0, -0.0, -1.0])])
    logits = torch.cat([logits, torch.tensor([1.0, 2.0, torch.finfo(torch.float32).max])])
    ends = ends_of(1)
    y, *_ = operators.splade_forward(torch.ones(1, 1), logits[:, None], None, ends, False)
    exact = logits.double().clamp(min=0).log1p()
    error = (y[0].double() - exact).abs() / exact.clamp(min=1e-38)
    # One rounding error of a result is 6e-8.
    assert error.max() < 1.5e-7
    assert (y[0] >= 0).all()


def test_infinite_and_nan_logits(isa, operators):
    values = [torch.inf, -torch.inf, torch.nan, 1.0]
    hidden, weight = torch.tensor([[1.0], [2.0]]), torch.tensor(values)[:, None]
    y, _, rows = operators.splade_forward(hidden, weight, None, ends_of(2), True)
    assert y[0, 0] == torch.inf
    assert y[0, 1] == 0
    assert y[0, 2].isnan()
    assert rows.tolist() == [[0, -1, -1, 1]]
    hidden = torch.tensor([[1.0], [torch.nan], [2.0]])
    y, *_ = operators.splade_forward(hidden, torch.ones(40, 1), None, ends_of(3), True)
    assert y.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_token_or_a_sequence(isa, operators, dtype):
    _, weight, bias, _ = draw((1,), 16, 67, dtype)
    for ends in (ends_of(), ends_of(0, 0)):
        hidden, count = torch.zeros(0, 16, dtype=dtype), len(ends) - 1
        results = run(operators, hidden, weight, bias, ends, torch.ones(count, 67, dtype=dtype))
        assert results["y"].shape == (count, 67)
        assert results["dhidden"].shape == (0, 16)
        assert not any(results[name].any() for name in ("y", *NAMES))


def test_nothing_is_kept_unless_a_gradient_is_wanted(isa, operators):
    problem = draw(LENGTHS, 40, 67, torch.float32)
    y, logits, rows = operators.splade_forward(*problem, False)
    assert logits.shape == rows.shape == (0,)
    assert torch.equal(y, operators.splade_forward(*problem, True)[0])


def test_rows_after_the_last_sequence_are_not_read(isa, operators):
    hidden, weight, bias, ends = draw((5, 30), 40, 67, torch.float32, slack=100)
    expected = operators.splade_forward(hidden, weight, bias, ends, True)
    hidden[35:] = torch.nan
    actual = operators.splade_forward(hidden, weight, bias, ends, True)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_an_fp32_weight_is_rounded_inside_the_products(isa, operators, dtype):
    hidden, _, bias, ends = draw(LENGTHS, 40, CLASSES, dtype)
    weight = torch.randn(CLASSES, 40)
    mixed = operators.splade_forward(hidden, weight, bias, ends, True)
    rounded = operators.splade_forward(hidden, weight.to(dtype), bias, ends, True)
    assert all(map(torch.equal, mixed, rounded))
    dy = torch.randn(mixed[0].shape).to(dtype)
    dweight = operators.splade_backward(dy, hidden, weight, bias, *mixed[1:])[1]
    assert dweight.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_operands_give_the_same_bits(isa, operators, dtype):
    hidden, weight, bias, ends = draw(LENGTHS, 40, 67, dtype)
    dy = torch.randn(len(LENGTHS), 67).to(dtype)
    expected = run(operators, hidden, weight, bias, ends, dy)
    wide = torch.stack((hidden, hidden), -1)[..., 0], torch.stack((weight, weight), -1)[..., 0]
    for given in (wide, (hidden.t().contiguous().t(), weight.t().contiguous().t())):
        actual = run(operators, *given, bias, ends, dy.t().contiguous().t())
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_a_sequence_alone_change_no_bit(isa, operators, dtype):
    hidden, weight, bias, ends = draw(LENGTHS, 40, CLASSES, dtype)
    dy = torch.randn(len(LENGTHS), CLASSES).to(dtype)
    expected = run(operators, hidden, weight, bias, ends, dy)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        actual = run(operators, hidden, weight, bias, ends, dy)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    for b in (1, 3, 7):
        begin, end = int(ends[b]), int(ends[b + 1])
        alone = (hidden[begin:end], weight, bias, ends_of(end - begin))
        results = run(operators, *alone, dy[b : b + 1])
        assert torch.equal(results["y"], expected["y"][b : b + 1])
        assert torch.equal(results["dhidden"], expected["dhidden"][begin:end])


MEMORY = """
import torch
from pathlib import Path
from fastbert import _C
ops = torch.ops.fastbert_C
torch.set_num_threads(2)
T, V, K = 16 * 256, 30522, 64
hidden, weight, bias = torch.randn(T, K), torch.randn(V, K), torch.randn(V)
ends = torch.arange(0, T + 1, 256).int()
dy = torch.randn(16, V)
def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
before = peak()
y, logits, rows = ops.splade_forward(hidden, weight, bias, ends, True)
ops.splade_backward(dy, hidden, weight, bias, logits, rows)
print((peak() - before) / (T * V * 4))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_logits(operators):
    """Both passes take a tenth of the memory of the logits of all tokens."""
    command = [sys.executable, "-c", MEMORY]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(result.stdout) < 0.1


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("hidden", {0: torch.zeros(9, 16, dtype=torch.float64)}, TypeError),
        ("hidden", {0: torch.zeros(9)}, ValueError),
        ("weight", {1: torch.zeros(67, 15)}, ValueError),
        ("weight", {1: torch.zeros(0, 16)}, ValueError),
        ("weight", {1: torch.zeros(67, 16, dtype=torch.bfloat16)}, TypeError),
        ("bias", {2: torch.zeros(66)}, ValueError),
        ("cu_seqlens", {3: torch.tensor([0, 4, 9])}, TypeError),
        ("cu_seqlens", {3: torch.tensor([0, 4, 10]).int()}, ValueError),
        ("cu_seqlens", {3: torch.tensor([1, 4, 9]).int()}, ValueError),
        ("cu_seqlens", {3: torch.tensor([0, 5, 4]).int()}, ValueError),
        ("cu_seqlens", {3: torch.zeros(0).int()}, ValueError),
    ],
)
def test_bad_input_names_the_argument(operators, name, change, error):
    arguments = [*draw((4, 5), 16, 67, torch.float32), True]
    for place, value in change.items():
        arguments[place] = value
    with pytest.raises(error, match=rf"^{name}: got .*allowed"):
        operators.splade_forward(*arguments)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("dy", {0: torch.zeros(2, 66)}, ValueError),
        ("dy", {0: torch.zeros(67)}, ValueError),
        ("dy", {0: torch.zeros(2, 67).half()}, TypeError),
        ("logits", {4: torch.zeros(3, 67)}, ValueError),
        ("logits", {4: torch.zeros(2, 67).half()}, TypeError),
        ("rows", {5: torch.zeros(2, 66).int()}, ValueError),
        ("rows", {5: torch.zeros(2, 67)}, TypeError),
        ("rows", {5: torch.full((2, 67), 9).int()}, ValueError),
        ("rows", {5: torch.full((2, 67), -2).int()}, ValueError),
    ],
)
def test_bad_input_of_the_backward_names_the_argument(operators, name, change, error):
    hidden, weight, bias, ends = draw((4, 5), 16, 67, torch.float32)
    kept = operators.splade_forward(hidden, weight, bias, ends, True)[1:]
    arguments = [torch.zeros(2, 67), hidden, weight, bias, *kept]
    for place, value in change.items():
        arguments[place] = value
    with pytest.raises(error, match=rf"^{name}: got .*allowed"):
        operators.splade_backward(*arguments)
