"""A check for nvcc, which not every machine has."""

from __future__ import annotations

import os
import shutil

import pytest


def require_nvcc() -> None:
    """Skip the test if nvcc is missing or cannot run."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on the path")
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("nvcc crashes with libasan loaded")
