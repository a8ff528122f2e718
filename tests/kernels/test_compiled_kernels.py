"""Compiled kernels have the required properties when the PTX machine runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from quick_cases import long_case

from fastbert.ops import backend

PROGRAM = Path(__file__).with_name("compiled_kernels.py")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(backend.EXTENSION is None, reason=backend.EXTENSION_STATE),
]


@pytest.mark.parametrize("arch", [long_case(80), 90])
@pytest.mark.every_case
def test_compiled_kernels_keep_their_promises(arch, pytestconfig):
    """No check has a finding, in a child process, because this process interprets Triton."""
    run = subprocess.run(
        [sys.executable, str(PROGRAM), str(arch)],
        env=backend.compiler_environment(pytestconfig.cache.mkdir("triton")),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    findings = json.loads(run.stdout)
    assert len(findings) == 6
    assert all(problems == [] for problems in findings.values()), findings
