"""The fixture of torch's number of threads; tests/_levels.py has the instruction-set levels."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
