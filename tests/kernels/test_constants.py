"""The global constants that kernels use are valid for Triton."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("triton")
KERNELS = Path(__file__).parents[2] / "kernels"


@pytest.mark.parametrize("module", sorted(path.stem for path in KERNELS.glob("*.py")))
def test_a_constant_equals_itself(module):
    """No constant is NaN; Triton refuses a launch if a constant differs from its old value."""
    from triton.language import constexpr

    constants = vars(importlib.import_module(f"fastbert.kernels.{module}"))
    for name, value in constants.items():
        if isinstance(value, constexpr):
            assert value.value == value.value, name
