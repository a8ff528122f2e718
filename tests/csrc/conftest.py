"""Fixtures of the tests of the C++ operators: the levels and the operators."""

from __future__ import annotations

import pytest
import torch
from _levels import emulated, extension, isa, trapped

__all__ = ["emulated", "extension", "isa", "operators", "trapped"]


@pytest.fixture
def operators(extension):
    return torch.ops.fastbert_C
