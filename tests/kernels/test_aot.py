"""Every shipped launch compiles for three generations of GPU on a machine without a GPU."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastbert.ops.backend import compiler_environment
from fastbert.testing.ahead_of_time import (
    ARCHITECTURES,
    KERNELS,
    compile_launches,
    judge,
    launches_of,
    nouns,
)

# The compilation takes a few minutes on two free cores.
pytestmark = pytest.mark.timeout(1500)

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
}


@pytest.fixture(scope="module")
def cache(pytestconfig):
    """Keep Triton's cache between runs, so that only changed kernels are compiled again."""
    return pytestconfig.cache.mkdir("triton")


@pytest.fixture(scope="module")
def compiled(cache):
    return list(compile_launches(processes=2, cache=cache))


def test_every_kernel_compiles_for_every_architecture(compiled):
    expected = {launch.name for noun in nouns() for launch in launches_of(noun)}
    assert set(nouns()) >= {"attention", "feed_forward", "layer_norm", "reduction"}
    for arch in ARCHITECTURES:
        assert {c.name for c in compiled if c.arch == arch} == expected


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_launch_passes_the_gate(compiled, arch):
    """`judge` checks stack, shared memory, matrix units, 16-byte loads, addresses and tf32."""
    faults = [f"{c}: {fault}" for c in compiled for fault in c.faults if c.arch == arch]
    assert not faults, "\n".join(faults)


def test_the_gate_sees_matrix_products(compiled):
    """If ``has_dot`` were never set, no kernel would have to use a matrix unit."""
    assert {c.name for c in compiled if c.has_dot and c.half} >= MATRIX_KERNELS
    assert {c.matrix for c in compiled if c.arch == 90 and c.name in MATRIX_KERNELS and c.half} == {
        "HGMMA"
    }


def test_every_kernel_is_among_the_shipped_launches():
    """A kernel without a shipped launch would never be checked."""
    written = {
        (path.stem, name)
        for path in KERNELS.glob("*.py")
        for name in re.findall(
            r"^@triton\.jit.*\ndef (_\w+_kernel)\(", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    functions = [launch.kernel.fn for noun in nouns() for launch in launches_of(noun)]
    shipped = {(f.__module__.rpartition(".")[2], f.__name__) for f in functions}
    assert written
    assert written - shipped == set()


def test_broken_kernels_fail_the_gate(cache):
    """Each kernel of faulty_launches.py breaks one rule, except for ``_right_addresses``."""
    program = Path(__file__).with_name("faulty_launches.py")
    run = subprocess.run(
        [sys.executable, str(program)],
        env=compiler_environment(cache),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout)
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
    assert found["right_addresses"] == []
    assert set(found) == {*expected, "right_addresses"}
    for name, words in expected.items():
        assert any(words in fault for fault in found[name]), f"{name}: {found[name]}"
    assert any("faulty_launches.py:" in fault for fault in found["rows_times_stride"])


def test_too_much_shared_memory_fails_the_gate(compiled):
    for arch, limit in ((80, 163), (90, 227), (100, 227)):
        launch = next(c for c in compiled if c.arch == arch and c.passed)
        assert not judge(dataclasses.replace(launch, shared=limit * 1024))
        assert judge(dataclasses.replace(launch, shared=limit * 1024 + 1))
