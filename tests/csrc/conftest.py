"""The operators of the tests of the C++ code; tests/conftest.py has the levels."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def operators(extension):
    return torch.ops.fastbert_C
