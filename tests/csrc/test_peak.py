"""The tile instructions of benchmarks/cpu/peak.c, compiled as in the benchmark, give right results.

The test traps the instructions and computes them in software (`_trapped.py`). With AMX, the
processor also executes them.
"""

from __future__ import annotations

import shutil
import subprocess

import _trapped
import pytest

PROBE = _trapped.SOURCE.with_name("peak_probe.c")
AMX = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")


def compile_probe(folder, trapped):
    """Compile the probe for software or the processor's tiles, and return the command to run it."""
    program, flags = folder / "peak_probe", ("-O2", "-march=native")
    if not trapped:
        command = ["gcc", *flags, "-o", program, PROBE, "-lm"]
        subprocess.run(command, check=True)
        return [program]
    parts = [folder / "handler.o", folder / "probe.o"]
    subprocess.run(["g++", *_trapped.FLAGS, "-c", "-o", parts[0], _trapped.SOURCE], check=True)
    subprocess.run(
        ["gcc", *flags, *AMX, "-DPROBE_TRAPPED", "-c", "-o", parts[1], PROBE], check=True
    )
    subprocess.run(["g++", "-no-pie", "-o", program, *parts, "-lm"], check=True)
    return [program, *_trapped.sites(program)]


@pytest.mark.parametrize("trapped", [True, False], ids=["trapped", "processor"])
def test_the_tiles_have_their_shape_and_their_operands(tmp_path, extension, trapped):
    own = "amx" in extension.build_info()["cpu_isas_supported"]
    reason = _trapped.lacking(extension) if trapped else None
    if not trapped and not own:
        reason = "this processor has no tiles of its own"
    if reason or shutil.which("gcc") is None:
        pytest.skip(reason or "compiling peak.c needs gcc")
    command = compile_probe(tmp_path, trapped)
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    # 3 rounds of 4 products compute 16 × 16 sums. Each sum has 32 terms in bf16, or 64 in int8.
    assert result.stdout == "bf16: 196608 operations, 0 wrong; int8: 393216 operations, 0 wrong\n"
