"""What the tests of the C++ operators share: the levels and the operators themselves."""

from __future__ import annotations

import _emulated
import _trapped
import pytest
import torch

LEVELS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx")


@pytest.fixture(scope="session")
def extension():
    return pytest.importorskip("fastbert._C", reason="fastbert._C was not built: no compiler")


@pytest.fixture(scope="session")
def emulated(tmp_path_factory, request, extension):
    folder = tmp_path_factory.getbasetemp()
    # Workers of one session have folders of their own inside the session's.
    if hasattr(request.config, "workerinput"):
        folder = folder.parent
    supported = extension.build_info()["cpu_isas_supported"]
    # The last one is compared with the real one wherever that can run.
    levels = [name for name in _emulated.LEVELS if name not in supported or name == "amx"]
    return _emulated.Emulated(_emulated.compile_library(folder, levels))


@pytest.fixture(scope="session")
def trapped(tmp_path_factory, extension):
    folder = tmp_path_factory.mktemp("trapped")
    tiles = _trapped.Trapped(_trapped.compile_library(folder), extension)
    tiles.install()
    yield tiles
    tiles.remove()


@pytest.fixture(params=LEVELS)
def isa(request, extension):
    """Forces each level in turn. Of the wide ones that this machine lacks, the tiles are trapped
    where all else can run, else the level is emulated; a level that this build lacks, or that
    cannot be emulated here, is skipped, and says so.
    """
    level, info, tiles = request.param, extension.build_info(), None
    if level in info["cpu_isas_supported"]:
        extension.set_cpu_isa(level)
    elif level == "amx" and not _trapped.lacking(extension):
        tiles = request.getfixturevalue("trapped")
        tiles.use(extension)
    elif level in info["cpu_isas"] and level in _emulated.LEVELS:
        reason = _emulated.lacking(extension)
        if reason:
            pytest.skip(f"this processor has no {level}, and {reason}")
        request.getfixturevalue("emulated").use(extension, level)
    else:
        pytest.skip(f"this processor or build has no {level}")
    yield level
    extension.set_cpu_isa(None)
    assert tiles is None or tiles.configured() == 0


@pytest.fixture
def operators(extension):
    return torch.ops.fastbert_C
