"""The CUDA kernels agree with float64 when the PTX machine runs nvcc's PTX on the CPU."""

from __future__ import annotations

import pytest
import torch
from _layer_norm import problem
from _nvcc import require_nvcc
from quick_cases import long_case

from fastbert import reference
from fastbert.activations import ACTIVATIONS
from fastbert.testing.compare import assert_close
from fastbert.testing.ptx.cuda_operators import CompiledOperators
from fastbert.testing.yardstick import Yardstick

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", params=[long_case(80, id="sm_80"), pytest.param(90, id="sm_90")])
def operators(request, tmp_path_factory):
    require_nvcc()
    return CompiledOperators(tmp_path_factory.mktemp("cuda"), request.param)


def check_layer_norm(case, operators):
    oracle = case.gradients(torch.float64)
    yardstick = Yardstick(lambda: case.gradients(case.x.dtype))
    for name, actual in case.run(operators).items():
        assert_close(f"layer_norm {name}", actual, oracle[name], yardstick[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "columns", [1, 59, 768, 1023, 1024, *map(long_case, (111, 384, 512, 3584))]
)
def test_layer_norm(operators, columns, dtype):
    check_layer_norm(problem(6, columns, dtype), operators)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("x_bias", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 1.0])
def test_layer_norm_optional_operands(operators, bias, residual, x_bias, dropout_p):
    operands = {"bias": bias, "residual": residual, "x_bias": x_bias}
    case = problem(7, 104, torch.float32, **operands, dropout_p=dropout_p)
    if residual or dropout_p < 1.0:
        check_layer_norm(case, operators)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [384, 512, 768, 1024])
def test_layer_norm_of_rows_that_fill_the_lanes(operators, columns, dtype):
    check_layer_norm(problem(9, columns, dtype, dropout_p=0.1), operators)


@pytest.mark.parametrize(
    ("rows", "columns"),
    # In the backward, a warp gets several rows if there are 1,056 rows or more, and a half warp
    # does if there are 2,112 or more. A block computes rows of more than 1,024 columns one at a
    # time. In the forward, 396 blocks compute four rows of one column each, so they iterate from
    # 1,585 rows on.
    [
        (1100, 40),
        *(long_case(*x) for x in ((1100, 768), (2200, 384), (600, 1032), (1600, 1))),
        # The next case takes 40 s on the PTX machine.
        long_case(16391, 1),
    ],
)
def test_layer_norm_of_more_rows_than_warps(operators, rows, columns):
    check_layer_norm(problem(rows, columns, torch.bfloat16, dropout_p=0.1), operators)


def test_layer_norm_dropout_mask_is_the_definitions_bit_for_bit(operators):
    case = problem(9, 203, torch.float32, x_bias=False, dropout_p=0.3)
    kept = reference.dropout_keep(case.seed, 0.3, (9, 203))
    assert torch.equal(case.run(operators)["dx"] != 0, kept)


def test_layer_norm_far_from_zero(operators):
    case = problem(16, 768, torch.float32, residual=False, x_bias=False)
    case.x += 1e4
    y = case.forward(operators)[0]
    oracle = case.gradients(torch.float64)
    yardstick = Yardstick(lambda: case.gradients(torch.float32))
    assert_close("y", y, oracle["y"], yardstick["y"])


def test_row_strides_and_odd_addresses(operators):
    for dtype in DTYPES:
        case = problem(5, 104, dtype, dropout_p=0.1)
        expected = case.run(operators)
        for name in ("x", "residual", "dy"):
            wide = torch.full((5, 211), torch.nan, dtype=dtype)
            wide[:, 1:105] = getattr(case, name)
            setattr(case, name, wide[:, 1:105])
        for name, actual in case.run(operators).items():
            assert torch.equal(actual, expected[name]), name


@pytest.mark.parametrize("columns", [768, 2048])
@pytest.mark.parametrize("parameters", DTYPES[:2])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_layer_norm_moves_whole_sectors(operators, dtype, parameters, columns):
    """The kernels move few more sectors than needed; scalar accesses would move up to 16 times."""
    case = problem(10, columns, dtype, dropout_p=0.1)
    for name in ("weight", "bias", "x_bias"):
        setattr(case, name, getattr(case, name).to(parameters))
    operators.compiled.reports.clear()
    case.run(operators)
    counts = {name: report.counts for name, report in operators.compiled.reports}
    assert set(counts) > {"layer_norm.forward_kernel", "layer_norm.backward_kernel"}
    for name, count in counts.items():
        # Here a block has one row. In the backward in 16 bits, half of the bytes are fp32 sums. A
        # lane writes 8 of these sums in two accesses, and each access covers half a sector.
        limit = 1.5 if dtype != torch.float32 and "backward" in name else 1.3
        assert count["global_sectors"] <= limit * count["global_least_sectors"], name


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_has_no_approximate_instruction(operators, dtype):
    """The results have the same bits if approximate instructions have their largest error."""
    case = problem(5, 111, dtype, dropout_p=0.1)
    exact = case.run(operators)
    for error in (-1, 1):
        operators.options = {"approximate": error}
        try:
            results = case.run(operators)
        finally:
            operators.options = {}
        for name, result in results.items():
            assert torch.equal(result, exact[name]), name


GELU = ("gelu", "gelu_tanh")


@pytest.mark.parametrize("activation", GELU)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (9, 111), (300, 64), (5, 3584)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_activation(operators, rows, columns, dtype, activation, with_bias):
    h, dy = 2 * torch.randn(rows, columns).to(dtype), torch.randn(rows, columns).to(dtype)
    bias = torch.randn(columns).to(dtype) if with_bias else None
    y = operators.activation_forward(h, bias, activation)
    dh, dbias, a = operators.activation_backward(dy, h, bias, activation, True, True)
    assert torch.equal(a, y)

    def solve(dtype):
        inputs = [t.detach().to(dtype).requires_grad_() for t in (h, bias) if t is not None]
        y = reference.activate(sum(inputs[1:], inputs[0]), activation)
        y.backward(dy.to(dtype))
        return [y.detach(), *(t.grad for t in inputs)]

    oracle, yardstick = solve(torch.float64), Yardstick(lambda: solve(dtype))
    for i, name in enumerate(("y", "dh", "dbias")[: len(oracle)]):
        assert_close(f"activation {name}", (y, dh, dbias)[i], oracle[i], yardstick[i])


def test_activation_gives_only_what_is_asked_for(operators):
    h, dy, bias = torch.randn(9, 111), torch.randn(9, 111), torch.randn(111)
    expected = operators.activation_backward(dy, h, bias, "gelu", True, True)
    dh, dbias, a = operators.activation_backward(dy, h, bias, "gelu", False, False)
    assert torch.equal(dh, expected[0])
    assert dbias.numel() == a.numel() == 0


def test_the_sum_over_the_rows_needs_no_bias(operators):
    h, dy = torch.randn(9, 111).bfloat16(), torch.randn(9, 111).bfloat16()
    _, expected, _ = operators.activation_backward(
        dy.float(), h.float(), torch.zeros(111), "gelu", True, False
    )
    _, total, _ = operators.activation_backward(dy, h, None, "gelu", True, False)
    assert total.dtype == torch.float32  # without a bias, dbias is in fp32
    assert torch.equal(total, expected)


@pytest.mark.parametrize(
    "activation", ["none", *(name for name in ACTIVATIONS if name not in GELU)]
)
def test_launchers_refuse_what_has_no_kernel(operators, activation):
    h = torch.zeros(4, 8)
    with pytest.raises(RuntimeError, match="the launcher returned the cudaError 1"):
        operators.activation_forward(h, None, activation)
    with pytest.raises(RuntimeError, match="the launcher returned the cudaError 1"):
        operators.activation_backward(h, h, None, activation, False, False)


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [
        (64, {}),
        (128, {}),
        (32, {}),
        (64, {"dropout_p": 0.1}),
        (64, {"mask": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()}),
        (128, {"mask": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril(), "dropout_p": 0.1}),
        (64, {"mask": torch.ones(1, 1, 1, 8, dtype=torch.bool)}),
    ],
)
def test_attention_chooses_a_kernel(operators, head_dim, options):
    q, k, v = torch.randn(3, 1, 2, 8, head_dim).bfloat16()
    seed = torch.tensor([3])
    numbers = 8, 8, options.get("dropout_p", 0.0), head_dim**-0.5
    operators.compiled.reports.clear()
    mask = options.get("mask")
    out, lse = operators.flash_attention_forward(q, k, v, mask, None, None, seed, *numbers)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    operators.flash_attention_backward(
        *gradients, out.contiguous(), q, k, v, out, lse, mask, None, None, seed, *numbers
    )
    on_hopper = operators.compiled.modules[0].text.target == "sm_90a"
    wide = "_wide" if on_hopper and head_dim == 128 else ""
    persistent = "persistent_" if on_hopper else ""
    # In each direction, an extra kernel first packs a mask that differs between queries into bits.
    pairs = on_hopper and mask is not None and mask.shape[2] > 1
    packing = ["pairs.pack_pairs_kernel"] * pairs
    assert [name for name, _ in operators.compiled.reports] == [
        *packing,
        f"attention_forward.{persistent}forward_kernel",
        *packing,
        f"attention_backward{wide}.{persistent}backward_kernel",
    ]
    expected = reference.attention(
        *(x.double() for x in (q, k, v)), **options, **({"dropout_seed": seed} if options else {})
    )
    assert torch.allclose(out.double(), expected, atol=0.02)
