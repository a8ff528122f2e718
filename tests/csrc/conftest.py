"""The operators for the tests of the C++ code; tests/_levels.py has the instruction-set levels."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def operators(extension):
    return torch.ops.fastbert_C
