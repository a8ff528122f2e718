"""The fixtures that set each instruction-set level, for tests of operators and models."""

from __future__ import annotations

import contextlib
import platform

import _emulated
import _trapped
import pytest

ARM = platform.machine() in ("aarch64", "arm64")
LEVELS = (
    ("baseline", "neon", "neon_bf16", "neon_i8mm")
    if ARM
    else ("baseline", "avx2", "avx512", "avx512_bf16", "amx")
)


@pytest.fixture(scope="session")
def extension():
    return pytest.importorskip("fastbert._C", reason="fastbert._C was not built: no compiler")


@pytest.fixture(scope="session")
def emulated(tmp_path_factory, request, extension):
    folder = tmp_path_factory.getbasetemp()
    # Each pytest worker has its own folder inside the folder of the test session.
    if hasattr(request.config, "workerinput"):
        folder = folder.parent
    supported = extension.build_info()["cpu_isas_supported"]
    # The emulated level amx is always built, because a test compares it with the compiled level.
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
    """Run a test at each instruction-set level.

    If the processor lacks only the tiles of a level, the tile instructions are trapped and computed
    in software. Other missing levels with 64-byte registers are emulated. At any other missing
    level, the test is skipped.
    """
    level, info = request.param, extension.build_info()
    trapping = contextlib.nullcontext()
    if level in info["cpu_isas_supported"]:
        extension.set_cpu_isa(level)
    elif level == "amx" and not _trapped.lacking(extension):
        tiles = request.getfixturevalue("trapped")
        trapping = tiles.trapping()
        tiles.use(extension)
    elif level in info["cpu_isas"] and level in _emulated.LEVELS:
        reason = _emulated.lacking(extension)
        if reason:
            pytest.skip(f"this processor has no {level}, and {reason}")
        request.getfixturevalue("emulated").use(extension, level)
    else:
        pytest.skip(f"this processor or build has no {level}")
    with trapping:
        yield level
        extension.set_cpu_isa(None)
