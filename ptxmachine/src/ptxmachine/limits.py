"""The most that a PTX text may ask of the machine.

A text that asks for more is refused when it is read, before anything of that size is allocated.
"""

from __future__ import annotations

from ptxmachine.errors import PtxSyntaxError

LINE = 100_000  # characters
REGISTERS = 65_536  # of a kernel with the functions that it calls
SCOPES = 256  # braces inside each other
CALLS = 64  # calls inside each other
INLINED = 100_000  # lines and statements that a kernel has by calls and by tables of branches
THREADS = 1024  # of a block, as on GPUs
# Bytes. Those of shared memory are what a multiprocessor has, those of parameters what CUDA allows.
PARAMETERS = 32_764
SHARED = 228 * 1024
LOCAL = 64 * 1024  # of a thread
GLOBAL = 64 * 1024 * 1024  # of a module
ALIGNMENT = 4096
MEMORY = {"shared": SHARED, "local": LOCAL, "param": LOCAL, "global": GLOBAL, "const": GLOBAL}


def at_most(value: int, most: int, what: str, line: int | None) -> int:
    """Return a value, or raise PtxSyntaxError if it is above a limit of the machine."""
    if value > most:
        raise PtxSyntaxError(f"{what}: got {value}, allowed: at most {most}", line)
    return value


def count(digits: str, most: int, what: str, line: int | None) -> int:
    """Return the number that decimal digits stand for, or raise PtxSyntaxError as `at_most`.

    Python refuses to convert thousands of digits, so the number of digits is checked first.
    """
    if len(digits) > 18:
        raise PtxSyntaxError(f"{what}: got a number of {len(digits)} digits, allowed: 18", line)
    return at_most(int(digits), most, what, line)
