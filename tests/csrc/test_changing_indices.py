"""An operator never crashes while another thread changes the indices that the operator reads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import _fresh_python
import pytest
from quick_cases import long_case

try:
    from _changing_indices import CASES
except ImportError as error:
    pytest.skip(f"fastbert._C was not built: {error}", allow_module_level=True)

PROGRAM = Path(__file__).with_name("_changing_indices.py")


@pytest.mark.parametrize(
    "name", [name if name == "embedding_forward" else long_case(name) for name in CASES]
)
def test_a_call_uses_the_numbers_that_it_checked(name):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = _fresh_python.run(PROGRAM, name, "1", env=env, timeout=120)
    assert run.returncode == 0, f"exit status {run.returncode}: {run.stderr}"
    returned, refused = map(int, run.stdout.split())
    assert returned + refused > 0
