"""Kernels are right for inputs whose rows are more than 2**31 elements apart.

Child processes run far_tensors.py, because a wrapped offset causes a segfault. Results of that
extent would need too much memory, so these tests do not cover them. Instead, test_aot.py searches
the addresses of every load and store for 32-bit products.
"""

from __future__ import annotations

import os
from pathlib import Path

import _fresh_python
import pytest
import torch
from quick_cases import long_case


@pytest.mark.skipif(torch.cuda.is_available(), reason="the mappings are memory of the CPU")
@pytest.mark.parametrize("launchers", [long_case("attention"), "norms", "products"])
def test_offsets_beyond_two_to_the_31(launchers):
    here = Path(__file__).parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(here.parents[1])}
    run = _fresh_python.run(here / "far_tensors.py", launchers, env=environment)
    assert run.stdout.strip() == "same", f"exit status {run.returncode}: {run.stderr[-2000:]}"
