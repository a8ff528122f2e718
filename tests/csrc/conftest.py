"""The fixture of the C++ operators; tests/_levels.py has the fixtures of instruction sets."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def operators(extension):
    return torch.ops.fastbert_C
