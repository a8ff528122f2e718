"""The C++ RMS norm agrees with float64, at every instruction-set level."""

from __future__ import annotations

import pytest
import torch

from fastbert import reference
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-6


def draw(rows, columns, dtype, residual=True):
    def tensor(*shape):
        return torch.randn(shape).to(dtype)

    extra = tensor(rows, columns) if residual else None
    return tensor(rows, columns), tensor(columns), extra, tensor(rows, columns)


def gradients(x, weight, residual, dy, dtype):
    inputs = [
        None if t is None else t.detach().to(dtype).requires_grad_() for t in (x, weight, residual)
    ]
    y = reference.rms_norm(inputs[0], inputs[1], residual=inputs[2], eps=EPS)
    y.backward(dy.to(dtype))
    return {"y": y.detach(), "dx": inputs[0].grad, "dweight": inputs[1].grad}


def run(operators, x, weight, residual, dy):
    y, rstd = operators.rms_norm_forward(x, weight, residual, EPS)
    dx, dweight = operators.rms_norm_backward(dy, x, weight, rstd, residual)
    return {"y": y, "dx": dx, "dweight": dweight}


def check(operators, *problem):
    oracle = gradients(*problem, torch.float64)
    yardstick = Yardstick(lambda: gradients(*problem, problem[0].dtype))
    for name, actual in run(operators, *problem).items():
        assert_close(f"rms_norm {name}", actual, oracle[name], yardstick[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [3, 59, 768, 1023])
def test_agrees_with_float64(isa, operators, columns, dtype):
    check(operators, *draw(37, columns, dtype))


def test_without_residual_and_in_several_chunks(isa, operators):
    check(operators, *draw(1500, 59, torch.float32, residual=False))


def test_huge_rows_stay_right(isa, operators):
    """Rows near 1e30, whose squares overflow fp32, have results as accurate as rows near 1."""
    x, weight, _, dy = draw(4, 111, torch.float32, residual=False)
    y = run(operators, x * 2.0**100, weight, None, dy)["y"]
    # The results of PyTorch in float64 and in fp32 are for rows without the factor 2**100. For
    # these rows, eps has a larger effect, so the float64 result is corrected for eps.
    oracle = gradients(x, weight, None, dy, torch.float64)["y"]
    yardstick = Yardstick(lambda: gradients(x, weight, None, dy, x.dtype)["y"])
    without_eps = x.double().square().mean(dim=-1, keepdim=True)
    assert_close("y", y, oracle * ((without_eps + EPS) / without_eps).sqrt(), yardstick)


def test_strides_rows_alone_and_threads_change_no_bit(isa, operators):
    x, weight, residual, dy = draw(1200, 111, torch.float32)
    expected = run(operators, x, weight, residual, dy)
    wide = torch.full((1200, 211), torch.nan)
    wide[:, 1:112] = x
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for name, actual in run(operators, wide[:, 1:112], weight, residual, dy).items():
            assert torch.equal(actual, expected[name]), name
    finally:
        torch.set_num_threads(threads)
    alone = run(operators, x[7:8], weight, residual[7:8], dy[7:8])
    assert torch.equal(alone["y"], expected["y"][7:8])
    assert torch.equal(alone["dx"], expected["dx"][7:8])


def test_no_rows(isa, operators):
    results = run(operators, *draw(0, 111, torch.float32))
    assert results["y"].shape == results["dx"].shape == (0, 111)
    assert torch.equal(results["dweight"], torch.zeros(111))


def test_bad_input_names_the_argument(operators):
    x, weight, residual, dy = draw(4, 8, torch.float32)
    bad = [("weight", (x, weight[:7], residual, EPS)), ("residual", (x, weight, residual[:3], EPS))]
    for name, arguments in [*bad, ("eps", (x, weight, residual, -1.0))]:
        with pytest.raises(ValueError, match=rf"^{name}: got .*allowed"):
            operators.rms_norm_forward(*arguments)
    with pytest.raises(ValueError, match=r"^rstd: got .*allowed"):
        operators.rms_norm_backward(dy, x, weight, torch.zeros(5), residual)
