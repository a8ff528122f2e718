"""Products with GELU in the epilogue are right on the PTX machine, for sm_80 and sm_90a."""

from __future__ import annotations

import pytest
import torch
from _cuda_gemm import KERNELS, Problem, compiled_in
from quick_cases import long_case

from fastbert.testing.compare import assert_close
from fastbert.testing.ptx.cuda_library import readable

pytestmark = pytest.mark.each_value

NAMES = ("y", "h", "dh", "dbias", "a")


@pytest.fixture(scope="module", params=[long_case(80, id="sm_80"), pytest.param(90, id="sm_90")])
def compiled(request, tmp_path_factory):
    return compiled_in(tmp_path_factory.mktemp("gemm"), request.param)


@pytest.fixture
def gemm(compiled):
    compiled.options = {"threads": 1}
    compiled.compiled.set_multiprocessors(2)
    compiled.compiled.reports.clear()
    return compiled


def check(problem, gemm):
    results = problem.run(gemm)
    saved = results[1]
    oracle, yardstick = problem.oracle(saved), problem.yardstick(saved)
    for i, name in enumerate(NAMES):
        assert_close(f"product {name}", results[i], oracle[i], yardstick[i])
    return results


@pytest.mark.parametrize(
    ("dtype", "activation", "with_bias", "seed"),
    [
        (torch.bfloat16, "gelu", True, 0),
        (torch.bfloat16, "gelu_tanh", False, 1),
        (torch.float16, "gelu", False, 2),
        (torch.float16, "gelu_tanh", True, 3),
    ],
)
def test_against_float64(gemm, dtype, activation, with_bias, seed):
    """Both directions agree with float64; a block computes two of four tiles, in many slices."""
    gemm.options["seed"] = seed
    y, h, *_, a = check(Problem(140, 328, 264, dtype, activation, with_bias, seed), gemm)
    # The backward recomputes the activation with the same bits.
    assert torch.equal(y, a)
    assert not torch.equal(y, h)


@pytest.mark.parametrize("sizes", [(1, 8, 8), (128, 64, 256), (129, 72, 16), (64, 40, 392)])
def test_sizes(gemm, sizes):
    gemm.options["seed"] = 1
    check(Problem(*sizes, torch.bfloat16), gemm)


def test_the_kernel_is_that_of_the_architecture(gemm):
    problem = Problem(8, 8, 8, torch.float16)
    problem.run(gemm)
    name = KERNELS[gemm.arch]
    assert [readable(kernel).split(".")[-1] for kernel, _ in gemm.compiled.reports] == [
        name, name, "sum_partials_kernel",
    ]  # fmt: skip


@pytest.mark.parametrize("blocks", [1, 3])
def test_any_schedule_gives_the_same_bits(gemm, blocks):
    problem = Problem(260, 200, 264, torch.bfloat16)
    expected = problem.run(gemm)
    gemm.compiled.set_multiprocessors(blocks)
    for seed in range(1, 3):
        gemm.options["seed"] = seed
        for actual, bits in zip(problem.run(gemm), expected, strict=True):
            assert torch.equal(actual, bits)


def test_rows_and_columns_around_the_operands_are_not_read(gemm):
    """The results have the same bits if the operands are slices of larger tensors full of NaN."""
    problem = Problem(70, 72, 72, torch.bfloat16)
    expected = problem.run(gemm)
    for name in ("x", "weight", "dy", "w2"):
        inner = getattr(problem, name)
        outer = torch.full((inner.shape[0] + 16, inner.shape[1] + 16), torch.nan).bfloat16()
        outer[8:-8, 8:-8] = inner
        setattr(problem, name, outer[8:-8, 8:-8])
    for actual, bits in zip(problem.run(gemm), expected, strict=True):
        assert torch.equal(actual, bits)


def test_no_rows(gemm):
    problem = Problem(0, 64, 72, torch.float16)
    y, h, dh, dbias, a = problem.run(gemm)
    assert y.shape == h.shape == dh.shape == a.shape == (0, 72)
    assert (dbias == 0).all()


def test_only_what_is_wanted_is_written(gemm):
    problem = Problem(40, 64, 72, torch.bfloat16)
    y, h, dh, _, a = problem.run(gemm)
    alone, nothing = gemm.linear_gelu_forward(
        problem.x, problem.weight, problem.bias, "gelu", False
    )
    assert torch.equal(alone, y)
    assert nothing.numel() == 0
    other, nothing, again = gemm.linear_gelu_gradient(problem.dy, problem.w2, h, "gelu", False)
    assert torch.equal(other, dh)
    assert torch.equal(again, a)
    assert nothing.numel() == 0


def test_memory_is_moved_in_whole_sectors_and_without_bank_conflicts(gemm):
    problem = Problem(128, 64, 256, torch.bfloat16)
    _, h = gemm.linear_gelu_forward(problem.x, problem.weight, problem.bias, "gelu", True)
    forward = gemm.counts()
    problem.backward(gemm, h)
    for counts in (forward, gemm.counts()):
        assert counts["shared_wavefronts"] == counts["shared_least_wavefronts"]
        # Two warps read the bias for the same 128 columns, so up to 16 sectors are read twice.
        assert counts["global_sectors"] <= counts["global_least_sectors"] + 16


def test_large_values(gemm):
    """For large |x|, GELU(x) is exactly x or 0, and its derivative is exactly 1 or 0."""
    problem = Problem(8, 8, 16, torch.float16)
    problem.x.fill_(100.0)
    problem.weight.copy_(torch.eye(16, 8) - 2 * torch.eye(16, 8).roll(8, 0))
    problem.bias.zero_()
    y, h, dh, _, a = problem.run(gemm)
    assert torch.equal(h[0], torch.tensor([100.0] * 8 + [-200.0] * 8).half())
    assert torch.equal(y, h.clamp_min(0))
    assert torch.equal(a, y)
    assert (dh[:, 8:] == 0).all()


@pytest.mark.parametrize(
    ("sizes", "dtype", "activation"),
    [
        ((8, 12, 16), torch.bfloat16, "gelu"),
        ((8, 16, 12), torch.bfloat16, "gelu"),
        ((8, 16, 16), torch.float32, "gelu"),
        ((8, 16, 16), torch.bfloat16, "relu"),
    ],
)
def test_what_the_kernels_do_not_serve_is_refused(gemm, sizes, dtype, activation):
    problem = Problem(*sizes, dtype)
    h = torch.zeros(sizes[0], sizes[2], dtype=dtype)
    with pytest.raises(RuntimeError, match="the launcher returned the cudaError 1"):
        gemm.linear_gelu_forward(problem.x, problem.weight, None, activation, False)
    with pytest.raises(RuntimeError, match="the launcher returned the cudaError 1"):
        gemm.linear_gelu_gradient(problem.dy, problem.w2, h, activation, False)
