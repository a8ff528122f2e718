"""A launch of every kernel compiles for sm_90 on a machine without a GPU.

`make every-case` compiles every launch for sm_80 and sm_90, and for other GPUs the launches whose
tile sizes differ from sm_80. `make ahead-of-time` compiles every launch for every architecture.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quick_cases import long_case

from fastbert.kernels.tiles import shared_memory, short_attention_obstacle
from fastbert.ops.backend import compiler_environment
from fastbert.testing.ahead_of_time import MATRIX_UNITS, compile_launches, from_json, judge
from fastbert.testing.shipped_launches import all_launches

# The compilation takes a few minutes on two idle cores.
pytestmark = pytest.mark.timeout(1500)

KERNELS = Path(__file__).parents[2] / "kernels"
COMPLETE = (80, 90)
OTHERS = (89, 100, 120)

# These kernels have a matrix product of 16-bit operands.
MATRIX_KERNELS = {
    "attention_bias_gradient",
    "attention_dkv",
    "attention_dq",
    "attention_forward",
    "attention_short_backward",
    "attention_short_forward",
    "attention_statistics",
    "attention_weights",
    "cross_entropy_dhidden",
    "cross_entropy_dlogits",
    "cross_entropy_dweight",
    "cross_entropy_partials",
    "feed_forward_backward",
    "linear_gelu",
    "splade_dhidden",
    "splade_forward",
}


@pytest.fixture(scope="module")
def cache(pytestconfig):
    """Return Triton's cache folder, which persists so that later runs compile only changes."""
    return pytestconfig.cache.mkdir("triton")


@pytest.fixture(scope="module")
def compiled(cache, pytestconfig):
    if not pytestconfig.getoption("--every-case"):
        return list(compile_launches((90,), processes=1, cache=cache, one_of_each=True))
    return [
        *compile_launches(COMPLETE, processes=2, cache=cache),
        *compile_launches(OTHERS, processes=2, cache=cache, unlike=(80,)),
    ]


def test_every_kernel_compiles(compiled):
    expected = {launch.name for launch in all_launches()}
    for arch in {c.arch for c in compiled} & set(COMPLETE):
        assert {c.name for c in compiled if c.arch == arch} == expected
    assert 90 in {c.arch for c in compiled}


@pytest.mark.parametrize("arch", [90, *map(long_case, (80, 89, 100, 120))])
def test_every_launch_passes_the_gate(compiled, arch):
    """No launch has an error in stack, shared memory, matrix units, loads, addresses or tf32."""
    launches = [c for c in compiled if c.arch == arch]
    faults = [f"{c}: {fault}" for c in launches for fault in c.faults]
    assert launches
    assert not faults, "\n".join(faults)


@pytest.mark.every_case
def test_tiles_of_one_architecture_do_not_spill(cache):
    """No kernel spills on sm_89 and sm_120, where the tile sizes of sm_80 would cause spills."""
    command = [sys.executable, "-m", "fastbert.testing.ahead_of_time", "--unlike", "80"]
    command += ["--arch", "89", "120", "--noun", "feed_forward", "--only", "linear_gelu"]
    run = subprocess.run(command, env=compiler_environment(cache), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    launches = [from_json(line) for line in run.stdout.splitlines()]
    tried = {(c.arch, c.dtype, c.constants["FUNCTION"]) for c in launches}
    assert tried >= {(89, "float32", "gelu"), (120, "float16", "gelu_tanh")}
    assert not [f"{c}: {fault}" for c in launches for fault in c.faults]


@pytest.mark.every_case
def test_a_small_shared_memory_holds_the_tiles_of_sm_80(compiled):
    """On sm_89, with 99 KiB, only fp32 products have other tiles, and one launch is refused."""
    assert {(c.name, c.dtype) for c in compiled if c.arch == 89} == {("linear_gelu", "float32")}
    too_large = [c for c in compiled if c.arch == 80 and c.shared > shared_memory(89)]
    assert [(c.name, c.constants["CHUNKS"]) for c in too_large] == [("attention_short_forward", 8)]
    obstacle = short_attention_obstacle("forward", 257, 64, torch.bfloat16, 89)
    assert obstacle == "keys: got 257, allowed: up to 256"
    assert short_attention_obstacle("forward", 257, 64, torch.bfloat16, 80) is None


def test_the_gate_sees_matrix_products(compiled):
    """``has_dot`` is set for every kernel with matrix products, which must use a matrix unit."""
    assert {c.name for c in compiled if c.has_dot and c.half} >= MATRIX_KERNELS
    assert {c.matrix for c in compiled if c.arch == 90 and c.name in MATRIX_KERNELS and c.half} == {
        "HGMMA"
    }


def test_every_kernel_is_among_the_shipped_launches():
    """Every kernel has a shipped launch, because the checks cover only shipped launches."""
    written = {
        (path.stem, name)
        for path in KERNELS.glob("*.py")
        for name in re.findall(
            r"^@triton\.jit.*\ndef (_\w+_kernel)\(", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    functions = [launch.kernel.fn for launch in all_launches()]
    shipped = {(f.__module__.rpartition(".")[2], f.__name__) for f in functions}
    assert written
    assert written - shipped == set()


@pytest.mark.every_case
def test_broken_kernels_fail_the_gate(cache):
    """The check refuses each kernel of faulty_launches.py except ``_right_addresses``."""
    program = Path(__file__).with_name("faulty_launches.py")
    run = subprocess.run(
        [sys.executable, str(program)],
        env=compiler_environment(cache),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    record = json.loads(run.stdout)
    expected = {
        "rows_times_stride": "32-bit address arithmetic",
        "rows_times_columns": "32-bit address arithmetic",
        "rows_times_constant": "32-bit address arithmetic",
        "stride_of_a_step": "32-bit address arithmetic",
        "in_tf32": "tf32",
        "spills": "bytes of stack",
        "copies_by_two_bytes": "narrow loads",
        "small_tiles": "matrix unit HMMA, expected HGMMA",
    }
    assert record["right_addresses"] == []
    assert set(record) == {*expected, "right_addresses"}
    for name, words in expected.items():
        assert any(words in fault for fault in record[name]), f"{name}: {record[name]}"
    assert any("faulty_launches.py:" in fault for fault in record["rows_times_stride"])


@pytest.mark.parametrize(("arch", "limit"), [(80, 163), (89, 99), (90, 227), (100, 227), (120, 99)])
def test_too_much_shared_memory_fails_the_gate(compiled, arch, limit):
    half = [c for c in compiled if c.half and c.has_dot and c.passed]
    matrix = MATRIX_UNITS[arch][0]
    launch = dataclasses.replace(half[0], arch=arch, matrix=matrix, shared=limit * 1024)
    assert not judge(launch)
    assert judge(dataclasses.replace(launch, shared=limit * 1024 + 1))


def test_an_overwritten_operand_fails_the_gate(compiled):
    launch = next(c for c in compiled if c.arch == 90 and c.passed)
    assert judge(dataclasses.replace(launch, overwritten=["R5 is operand A"])) == [
        "R5 is operand A"
    ]


def test_a_wrong_descriptor_fails_the_gate(compiled):
    launch = next(c for c in compiled if c.arch == 90 and c.passed)
    assert judge(dataclasses.replace(launch, stale=["UR11 is no descriptor"])) == [
        "UR11 is no descriptor"
    ]
