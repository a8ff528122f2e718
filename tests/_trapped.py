"""Run the AMX level of the built extension on any processor, with tile instructions in software.

The kernels run as they ship, except that an invalid instruction replaces the first byte of each
tile instruction. The processor then raises SIGILL, and `trapped_tiles.cpp` computes the result. The
processor executes all other instructions, and therefore needs AVX512_BF16.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import _table

SOURCE = Path(__file__).with_name("csrc") / "trapped_tiles.cpp"
PROBE = SOURCE.with_name("trapped_probe.cpp")
FLAGS = ("-std=c++17", "-O3", "-mavx512f", "-mprefer-vector-width=512", "-ffp-contract=off")
MOST_SITES = 4096
TILE = re.compile(r"^ *([0-9a-f]+):\t(tile|tdp|ldtilecfg|sttilecfg)")


def lacking(extension) -> str | None:
    """Return the reason why tiles cannot be trapped on this machine, or None."""
    info = extension.build_info()
    if sys.platform != "linux" or "amx" not in info["cpu_isas"]:
        return "trapping its tiles needs Linux on x86-64"
    if "avx512_bf16" not in info["cpu_isas_supported"]:
        return "trapping its tiles needs AVX512_BF16 and AVX512_VNNI"
    for tool in ("g++", "objdump"):
        if shutil.which(tool) is None:
            return f"trapping its tiles needs {tool}"
    reason = _table.lacking(extension)
    return reason and f"trapping its tiles needs {reason}"


def compile_library(folder: Path) -> Path:
    library = folder / "trapped_tiles.so"
    subprocess.run(["g++", *FLAGS, "-fPIC", "-shared", "-o", library, SOURCE], check=True)
    return library


def compile_probe(program: Path) -> None:
    """Compile the probe without -pie, so that its data have 32-bit addresses."""
    subprocess.run(["g++", *FLAGS, "-no-pie", "-o", program, SOURCE, PROBE], check=True)


def sites(program: Path) -> list[str]:
    """Return the tile instructions' addresses, for `trapped_tiles_begin` in a non-PIE program."""
    return [f"{site:x}" for site in tile_instructions(str(program))]


class Trapped:
    """The trap handler in a library from `compile_library`, and the extension's kernel table."""

    def __init__(self, library: Path, extension) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.trapped_tiles_configured.restype = ctypes.c_int64
        self.base = _table.base(extension)
        self.instructions = tile_instructions(extension.__file__)
        addresses = [self.base + site for site in self.instructions]
        self.sites = (ctypes.c_uint64 * len(addresses))(*addresses)

    def install(self) -> None:
        assert self.library.trapped_tiles_install() == 0

    def remove(self) -> None:
        assert self.library.trapped_tiles_remove() == 0

    @contextlib.contextmanager
    def trapping(self):
        """Trap the extension's tile instructions inside the ``with`` block."""
        count = ctypes.c_int64(len(self.sites))
        assert self.library.trapped_tiles_set(self.sites, count, 1) == 0
        yield
        assert self.configured() == 0
        assert self.library.trapped_tiles_set(self.sites, count, 0) == 0

    def use(self, extension) -> None:
        """Set the level amx even if the processor lacks AMX; call this only inside `trapping`."""
        address, size = _table.symbols(extension.__file__)[_table.of("amx")]
        _table.use(extension, self.base + address, size)

    def executed(self) -> set[int]:
        """Return the addresses, in the file, of the tile instructions that were executed so far."""
        sites = (ctypes.c_uint64 * MOST_SITES).in_dll(self.library, "trapped_tiles_sites")
        return {site - self.base for site in sites if site}

    def configured(self) -> int:
        """Return the number of threads that have not released their tiles."""
        return self.library.trapped_tiles_configured()


def tile_instructions(library: str) -> dict[int, str]:
    """Return the text of every tile instruction, by its address in the file."""
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True
    ).stdout
    matches = ((TILE.match(line), line) for line in listing.splitlines())
    return {int(match[1], 16): line.strip() for match, line in matches if match}
