"""What the tests of the C++ operators share: the levels and the operators themselves."""

from __future__ import annotations

import _emulated
import pytest
import torch

LEVELS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx")


@pytest.fixture(scope="session")
def extension():
    return pytest.importorskip("fastbert._C", reason="fastbert._C was not built: no compiler")


@pytest.fixture(scope="session")
def emulated(tmp_path_factory, request):
    folder = tmp_path_factory.getbasetemp()
    # Workers of one session have folders of their own inside the session's.
    if hasattr(request.config, "workerinput"):
        folder = folder.parent
    return _emulated.Emulated(_emulated.compile_library(folder))


@pytest.fixture(params=LEVELS)
def isa(request, extension):
    """Forces each level in turn. A wide one that this machine lacks is emulated; a level that this
    build lacks, or that cannot be emulated here, is skipped, and says so.
    """
    level, info = request.param, extension.build_info()
    if level in info["cpu_isas_supported"]:
        extension.set_cpu_isa(level)
    elif level in info["cpu_isas"] and level in _emulated.LEVELS:
        reason = _emulated.lacking(info["cpu_isas_supported"])
        if reason:
            pytest.skip(f"this processor has no {level}, and {reason}")
        request.getfixturevalue("emulated").use(extension, level)
    else:
        pytest.skip(f"this processor or build has no {level}")
    yield level
    extension.set_cpu_isa(None)


@pytest.fixture
def operators(extension):
    return torch.ops.fastbert_C
