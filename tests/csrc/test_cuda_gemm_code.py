"""The machine code of products with GELU has few registers and instructions, and no spills."""

from __future__ import annotations

import re

import _machine_code
import pytest
from _nvcc import require_nvcc
from quick_cases import long_case

from fastbert.testing.ptx import cuda_gemm
from fastbert.testing.wgmma_hazards import overwritten_operands


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the temporary folder that contains the compiled kernels."""
    require_nvcc()
    pytest.importorskip("triton", reason="its wheel has cuobjdump")
    return tmp_path_factory.mktemp("code")


@pytest.fixture(scope="module", params=[long_case(80, id="sm_80"), pytest.param(90, id="sm_90")])
def compiled(request, folder):
    """Return the architecture, the disassembled kernels and the report of ptxas."""
    return request.param, *cuda_gemm.machine_code(folder, request.param)


def test_two_blocks_of_sm_80_share_a_multiprocessor_and_nothing_spills(compiled):
    arch, kernels, report = compiled
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    assert len(kernels) == len(registers) == 8
    assert set(re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", report)) == {("0", "0")}
    # A message of ptxas with a number C75.. says that ptxas serialises wgmma.
    assert "(C75" not in report
    # A multiprocessor has 65,536 registers. They suffice for two blocks of 128 threads (sm_80), or
    # for one block of 384 threads (sm_90a).
    assert max(registers) <= (256 if arch == 80 else 168)


def test_registers_and_shared_memory_are_those_of_the_record(compiled, folder):
    name = "90a" if compiled[0] == 90 else str(compiled[0])
    result = _machine_code.resources(folder / f"gemm{name}.cubin")
    assert result == _machine_code.recorded(name, "product")


@pytest.mark.every_case
@pytest.mark.parametrize("arch", [89, 100, 120])
def test_other_architectures_have_those_of_the_record(folder, arch):
    _, report = cuda_gemm.machine_code(folder, arch)
    assert set(re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", report)) == {("0", "0")}
    result = _machine_code.resources(folder / f"gemm{arch}.cubin")
    assert result == _machine_code.recorded(str(arch), "product")
    assert max(line["registers"] for line in result.values()) <= 256


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_kernels_use_the_units_of_their_architecture(compiled, dtype, direction, activation):
    arch, kernels, _ = compiled
    text = kernels[dtype, direction, activation]
    meant, others = ("HMMA.16816", "LDSM", "LDGSTS"), ("HGMMA",)
    if arch == 90:
        meant, others = ("HGMMA.64x256x16", "UTMALDG.2D", "STSM"), (" HMMA", "LDSM", "LDGSTS")
    for name in meant:
        assert name in text, name
    for name in (*others, "LDL", "STL"):
        assert name not in text, name
    assert overwritten_operands(text) == []


@pytest.mark.parametrize(("direction", "limit"), [("forward", 52), ("backward", 49)])
def test_the_loop_over_slices_has_little_beside_the_products(compiled, direction, limit):
    """The loop has few instructions other than products, so the tensor cores stay busy.

    On Hopper, four products of a group of warps take 512 cycles of the tensor cores. On Ampere, 64
    products of each of four warps take as long. Each scheduler issues instructions for one warp of
    a group or block.
    """
    arch, kernels, _ = compiled
    for dtype in ("bfloat16", "float16"):
        inside = cuda_gemm.loop(
            kernels[dtype, direction, "gelu"], "HMMA" if arch == 80 else "HGMMA"
        )
        print(dtype, inside.total(), dict(inside))
        if arch == 90:
            assert inside["HGMMA"] == 4
            assert inside.total() <= limit
        else:
            assert (inside["HMMA"], inside["LDSM"], inside["LDGSTS"]) == (64, 16, 8)
            assert inside.total() <= 195


LIMITS = {
    (80, "forward"): 680, (80, "backward"): 870, (90, "forward"): 1200, (90, "backward"): 1550,
}  # fmt: skip


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_epilogue_has_few_instructions_for_an_element(compiled, direction):
    """The loop of the epilogue, which computes 32 elements per lane, has few instructions.

    On Hopper, the loop also contains three copies of the code that only the first warp executes to
    copy tiles. csrc/cuda/hopper/README.md has the counts without this code.
    """
    arch, kernels, _ = compiled
    for dtype in ("bfloat16", "float16"):
        inside = cuda_gemm.loop(kernels[dtype, direction, "gelu"], "MUFU", 64)
        print(dtype, inside.total(), dict(inside))
        # Each element needs a reciprocal and an exponential. On Hopper, the copies need divisions.
        assert inside["MUFU"] == (64 if arch == 80 else 70)
        assert inside["STG"] == 8
        assert inside.total() <= LIMITS[arch, direction]
