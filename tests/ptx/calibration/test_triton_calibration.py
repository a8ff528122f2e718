"""Triton kernels that follow Triton's tutorials are right on the PTX machine.

`make calibrate` runs all cases of triton_cases.py, and `make test` runs none.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastbert.ops.backend import HAS_TRITON, compiler_environment

pytestmark = pytest.mark.every_case

PROGRAM = Path(__file__).with_name("run_triton.py")
REST = "all other cases"
BOTH = (
    "layer norm, backward, with locks between blocks",
    "matmul bfloat16, tile (128, 128, 32), 8 warps",
    "matmul float16, a r, b c",
    "matmul float16, a c, b r",
    "matmul float32, a r, b c",
    "matmul int8, a r, b c",
    "matmul float16, a from registers",
    "matmul, sum over K by atomics",
    "persistent matmul with descriptors that the kernel makes",
    "attention bfloat16, causal",
    "scans",
    "transpose, gather, split, join, permute, int8",
    "histograms",
    "atomics",
    "functions of fp64, by libdevice",
    "bits of 32-bit integers",
    "cast float32 to float8_e5m2",
)
HOPPER = (
    "matmul float16 with fp16 accumulators of wgmma",
    "persistent matmul with descriptors, float16",
    "persistent matmul with descriptors, specialised warps, 4 of them",
    "copies and sums of boxes (16, 32), int32",
    "attention with descriptors",
)
CASES = [(80, name) for name in BOTH] + [(90, name) for name in BOTH + HOPPER]


def identifier(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_")


@pytest.fixture(scope="module")
def results(request) -> dict[tuple[int, str], dict[str, Any]]:
    """Return the results of the selected tests' cases, from one child process per architecture."""
    if not HAS_TRITON:
        pytest.skip("triton is not installed")
    chosen: dict[int, set[str]] = {}
    for item in request.session.items:
        if item.path == request.path and "name" in getattr(item, "callspec", item).params:
            chosen.setdefault(item.callspec.params["arch"], set()).add(item.callspec.params["name"])
    found = {}
    for arch, names in chosen.items():
        command = [sys.executable, str(PROGRAM), "--arch", str(arch)]
        if REST not in names:
            command += ["--names", *sorted(names)]
        run = subprocess.run(
            command, env=compiler_environment(), capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr[-4000:]
        for line in run.stdout.splitlines():
            row = json.loads(line)
            found[arch, row["name"]] = row
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("arch", "name"), [*CASES, (80, REST), (90, REST)], ids=lambda value: identifier(str(value))
)
def test_a_kernel_that_is_right_on_gpus(results, arch, name):
    named = {case for of, case in CASES if of == arch}
    rows = [row for (of, case), row in results.items() if of == arch and case == name]
    if name == REST:
        rows = [row for (of, case), row in results.items() if of == arch and case not in named]
    assert rows
    errors = [f"{row['name']}: {row['error']}" for row in rows if row["error"]]
    assert not errors, "\n".join(errors)
