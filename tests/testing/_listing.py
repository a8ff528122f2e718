"""Machine code for the tests of its checks."""

from __future__ import annotations


def listing(*instructions: str) -> str:
    """Return the instructions as a listing of cuobjdump, at addresses 16 bytes apart."""
    lines = [f"        /*{16 * i:04x}*/ {text} ;" for i, text in enumerate(instructions)]
    return "\n".join(["\t\tFunction : kernel", *lines, f"/*{16 * len(lines):04x}*/ EXIT ;"])
