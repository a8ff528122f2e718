"""What the tests of the C++ operators share: the levels and the operators themselves."""

from __future__ import annotations

import pytest
import torch

LEVELS = ("baseline", "avx2", "avx512")


@pytest.fixture(scope="session")
def extension():
    return pytest.importorskip("fastbert._C", reason="fastbert._C was not built: no compiler")


@pytest.fixture(params=LEVELS)
def isa(request, extension):
    """Forces each level in turn; one that this machine or build lacks is skipped, and says so."""
    if request.param not in extension.build_info()["cpu_isas_supported"]:
        pytest.skip(f"this processor or build has no {request.param}")
    extension.set_cpu_isa(request.param)
    yield request.param
    extension.set_cpu_isa(None)


@pytest.fixture
def operators(extension):
    return torch.ops.fastbert_C
