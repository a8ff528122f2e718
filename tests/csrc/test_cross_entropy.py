"""The C++ linear cross entropy agrees with float64, at every instruction-set level."""

from __future__ import annotations

import pytest
import torch

from fastbert import reference
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IGNORED = -100
NAMES = ("dhidden", "dweight", "dbias")
# The kernel splits the classes into parts; 4,101 classes are two whole parts and an odd remainder.
CLASSES = 4101


def draw(rows, depth, classes, dtype, *, share=0.6):
    labels = torch.randint(0, classes, (rows,))
    labels[torch.rand(rows) > share] = IGNORED
    if rows > 1:
        labels[0], labels[1] = 0, classes - 1
    hidden, weight = torch.randn(rows, depth), torch.randn(classes, depth) / depth**0.5
    return hidden.to(dtype), weight.to(dtype), torch.randn(classes).to(dtype), labels


def gradients(hidden, weight, bias, labels, reduction, dloss, dtype):
    inputs = [
        t if t is None else t.detach().to(dtype).requires_grad_() for t in (hidden, weight, bias)
    ]
    loss = reference.linear_cross_entropy(*inputs, labels, reduction=reduction)
    loss.backward(dloss.to(loss.dtype))
    names = zip(NAMES, inputs, strict=True)
    return {"loss": loss.detach(), **{n: t.grad for n, t in names if t is not None}}


def run(operators, hidden, weight, bias, labels, reduction, dloss):
    given = (hidden, weight, bias, labels)
    loss, *kept = operators.linear_cross_entropy_forward(*given, IGNORED, reduction)
    results = operators.linear_cross_entropy_backward(dloss, *given, *kept, reduction)
    return {"loss": loss, **dict(zip(NAMES, results, strict=True))}


def check(operators, problem, reduction="mean"):
    dloss = torch.rand(len(problem[3])) if reduction == "none" else torch.tensor(1.5)
    oracle = gradients(*problem, reduction, dloss, torch.float64)
    dtype = problem[0].dtype
    yardstick = Yardstick(lambda: gradients(*problem, reduction, dloss, dtype))
    actual = run(operators, *problem, reduction, dloss)
    for name, expected in oracle.items():
        assert_close(f"cross_entropy {name}", actual[name], expected, yardstick[name])
    return actual


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("rows", [37, 700])
def test_an_fp32_weight_is_rounded_inside_the_products(isa, operators, rows, dtype):
    """Only the gradient of the weight differs: it is not rounded to 16 bits."""
    hidden, _, bias, labels = draw(rows, 40, CLASSES, dtype)
    weight = torch.randn(CLASSES, 40)
    dloss = torch.tensor(1.5)
    mixed = run(operators, hidden, weight, bias, labels, "mean", dloss)
    rounded = run(operators, hidden, weight.to(dtype), bias, labels, "mean", dloss)
    assert mixed["dweight"].dtype == torch.float32
    assert torch.equal(mixed.pop("dweight").to(dtype), rounded.pop("dweight"))
    for name, expected in rounded.items():
        assert torch.equal(mixed[name], expected), name


def test_a_weight_of_another_dtype_is_refused(operators):
    hidden, weight, bias, labels = draw(5, 8, 20, torch.bfloat16)
    with pytest.raises(TypeError, match="weight: got dtype Half, allowed: BFloat16, the dtype of"):
        run(operators, hidden, weight.half(), bias, labels, "mean", torch.tensor(1.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_agrees_with_float64(isa, operators, reduction, dtype):
    check(operators, draw(37, 40, CLASSES, dtype), reduction)


@pytest.mark.parametrize(("rows", "depth", "classes"), [(1, 1, 1), (5, 59, 3), (3, 111, 2049)])
def test_odd_sizes_and_no_bias(isa, operators, rows, depth, classes):
    hidden, weight, _, labels = draw(rows, depth, classes, torch.float32, share=1.0)
    results = check(operators, (hidden, weight, None, labels))
    assert results["dbias"].numel() == 0


def test_more_rows_than_a_block(isa, operators):
    check(operators, draw(700, 8, 67, torch.float32, share=0.9))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_label_at_all(isa, operators, dtype):
    hidden, weight, bias, labels = draw(9, 16, 67, dtype)
    labels[:] = IGNORED
    results = run(operators, hidden, weight, bias, labels, "mean", torch.tensor(1.0))
    assert results["loss"] == 0
    assert not any(results[name].any() for name in NAMES)


def test_large_logits(isa, operators):
    """The loss is exact for logits around 1e4, where a log-sum-exp in fp32 would be off by 5e-4."""
    hidden, weight, bias, labels = draw(9, 16, 67, torch.float32, share=1.0)
    check(operators, (hidden, weight, 1e4 + bias, labels))
    check(operators, (hidden, weight, bias - 1e4, labels))
    check(operators, (hidden, weight, bias * 1e4, labels))


def test_rows_without_a_label_are_not_read(isa, operators):
    hidden, weight, bias, labels = draw(37, 40, 67, torch.float32)
    expected = run(operators, hidden, weight, bias, labels, "mean", torch.tensor(1.0))
    hidden[labels == IGNORED] = torch.nan
    for name, actual in run(
        operators, hidden, weight, bias, labels, "mean", torch.tensor(1.0)
    ).items():
        assert torch.equal(actual, expected[name]), name


def test_another_label_is_ignored_on_request(operators):
    hidden, weight, bias, labels = draw(37, 40, 67, torch.float32)
    expected = operators.linear_cross_entropy_forward(hidden, weight, bias, labels, IGNORED, "mean")
    labels[labels == IGNORED] = 99
    given = (hidden, weight, bias, labels)
    actual = operators.linear_cross_entropy_forward(*given, 99, "mean")
    assert all(map(torch.equal, actual, expected))
    with pytest.raises(ValueError, match=r"^labels: got 99, allowed: 0 to 66, or -100"):
        operators.linear_cross_entropy_forward(*given, IGNORED, "mean")


def test_nan_stays_in_its_row(isa, operators):
    hidden, weight, bias, labels = draw(9, 16, 67, torch.float32, share=1.0)
    hidden[4] = torch.nan
    loss = run(operators, hidden, weight, bias, labels, "none", torch.ones(9))["loss"]
    assert loss[4].isnan()
    assert loss[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_and_rows_alone_change_no_bit(isa, operators, dtype):
    hidden, weight, bias, labels = draw(50, 40, CLASSES, dtype, share=1.0)
    dloss = torch.rand(50)
    expected = run(operators, hidden, weight, bias, labels, "none", dloss)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        actual = run(operators, hidden, weight, bias, labels, "none", dloss)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    alone = run(operators, hidden[7:8], weight, bias, labels[7:8], "none", dloss[7:8])
    assert torch.equal(alone["loss"], expected["loss"][7:8])
    assert torch.equal(alone["dhidden"], expected["dhidden"][7:8])


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("weight", {1: torch.zeros(67, 15)}, ValueError),
        ("weight", {1: torch.zeros(67, 16, dtype=torch.bfloat16)}, TypeError),
        ("bias", {2: torch.zeros(66)}, ValueError),
        ("labels", {3: torch.zeros(8, dtype=torch.int64)}, ValueError),
        ("labels", {3: torch.full((9,), 67)}, ValueError),
        ("reduction", {5: "average"}, ValueError),
    ],
)
def test_bad_input_names_the_argument(operators, name, change, error):
    arguments = [*draw(9, 16, 67, torch.float32), IGNORED, "mean"]
    for place, value in change.items():
        arguments[place] = value
    with pytest.raises(error, match=rf"^{name}: got .*allowed"):
        operators.linear_cross_entropy_forward(*arguments)
