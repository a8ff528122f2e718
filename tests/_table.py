"""Set the table of kernel functions that the extension uses.

The extension's Python module has no function that sets the table, because a wrong address would
crash the process. Tests look up ``set_kernels`` (``csrc/cpu/isa/dispatch.h``) in the symbols of the
library, and call the function by its address.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess

SET_KERNELS = "_ZN8fastbert3cpu11set_kernelsEPKNS0_7KernelsE"


def of(level: str) -> str:
    """Return the symbol name of the kernel table of an instruction-set level."""
    return f"_ZN8fastbert3cpu{len(level)}{level}8kKernelsE"


@functools.cache
def symbols(library: str) -> dict[str, tuple[int, int]]:
    """Return the address and the size in bytes of every symbol, hidden or not, by its name."""
    listing = subprocess.run(
        ["nm", "--print-size", library], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in listing.splitlines()]
    return {row[3]: (int(row[0], 16), int(row[1], 16)) for row in rows if len(row) == 4}


def lacking(extension) -> str | None:
    """Return the tool or library that this machine lacks to set a table, or None."""
    if shutil.which("nm") is None:
        return "nm"
    present = {SET_KERNELS, of("baseline")} <= set(symbols(extension.__file__))
    return None if present else "fastbert._C with its symbols (it was stripped)"


def base(extension) -> int:
    """Return the address at which the extension is loaded."""
    anchor = ctypes.PyDLL(extension.__file__).PyInit__C
    offset = symbols(extension.__file__)["PyInit__C"][0]
    return ctypes.cast(anchor, ctypes.c_void_p).value - offset


def use(extension, address: int, size: int) -> None:
    """Use the table at ``address``; ``size`` in bytes must equal the table size of this build."""
    names = symbols(extension.__file__)
    assert size == names[of("baseline")][1], "the table is another build's"
    set_kernels = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(base(extension) + names[SET_KERNELS][0])
    set_kernels(address)
