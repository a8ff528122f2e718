"""A first import under another device, dtype or mode of torch does not change later results."""

from __future__ import annotations

import os
from pathlib import Path

import _fresh_python
import first_import
import pytest
from quick_cases import long_case

PROGRAM = Path(first_import.__file__)


@pytest.fixture(scope="module")
def expected() -> str:
    """Return the digest in this process, which imports every module without a mode."""
    first_import.import_everything()
    return first_import.digest()


@pytest.mark.parametrize(
    "mode", [m if m == "device meta" else long_case(m) for m in first_import.MODES]
)
def test_an_ordinary_model_runs_as_after_an_ordinary_import(expected, mode):
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parents[2])}
    run = _fresh_python.run(PROGRAM, mode, env=environment)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.strip() == expected
