"""Fixtures for models on the CPU: the instruction-set levels and the threads."""

from __future__ import annotations

import pytest
import torch
from _levels import emulated, extension, isa, trapped

__all__ = ["emulated", "extension", "isa", "threads", "trapped"]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
