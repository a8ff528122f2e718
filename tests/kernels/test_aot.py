"""Every shipped launch compiles for three generations of GPU, without one being there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# A minute and a half on two free cores.
pytestmark = pytest.mark.timeout(1500)

HERE = Path(__file__).parent
ARCHITECTURES = (80, 90, 100)
MATRIX_KERNELS = ("attention_forward", "attention_dq", "attention_dkv", "linear_gelu")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What ahead_of_time.py prints, compiled from nothing."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        # Triton 3.10 flips its default, which moves last bits.
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "ahead_of_time.py"), "--processes", "2"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def names(results) -> set[str]:
    return {f"{r['name']} {r['dtype']} sm_{r['arch']} {r['constants']}" for r in results}


def test_every_kernel_compiles_for_every_architecture(compiled):
    kernels = {r["name"] for r in compiled}
    assert kernels >= {*MATRIX_KERNELS, "attention_delta", "attention_weights"}
    assert kernels >= {"layer_norm_forward", "layer_norm_backward", "gelu_backward"}
    for kernel in kernels:
        assert {r["arch"] for r in compiled if r["name"] == kernel} == set(ARCHITECTURES)


def test_nothing_spills(compiled):
    assert names(r for r in compiled if r["stack"] > 0) == set()


def test_half_precision_uses_hoppers_matrix_units(compiled):
    hopper = [r for r in compiled if r["arch"] == 90 and r["name"] in MATRIX_KERNELS]
    half = [r for r in hopper if r["dtype"] != "*fp32"]
    assert {r["name"] for r in half} == set(MATRIX_KERNELS)
    assert names(r for r in half if not r["hgmma"]) == set()


def test_single_precision_is_ieee(compiled):
    """tl.dot falls back to tf32 unless it is told not to."""
    assert names(r for r in compiled if r["dtype"] == "*fp32" and r["tf32"]) == set()


def test_shared_memory_fits(compiled):
    """163 KiB per block on sm_80, 227 KiB later."""
    limits = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
    assert names(r for r in compiled if r["shared"] > limits[r["arch"]]) == set()
