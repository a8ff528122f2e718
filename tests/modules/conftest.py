"""Fixtures for models on the CPU: the instruction-set levels and the threads."""

from __future__ import annotations

import pytest
import torch

from fastbert.ops import backend as backends

LEVELS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx")


@pytest.fixture(params=LEVELS)
def isa(request):
    """Set each level in turn; a level that this machine or build lacks is skipped."""
    if request.param not in backends.EXTENSION.build_info()["cpu_isas_supported"]:
        pytest.skip(f"this processor or build has no {request.param}")
    backends.EXTENSION.set_cpu_isa(request.param)
    yield request.param
    backends.EXTENSION.set_cpu_isa(None)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
