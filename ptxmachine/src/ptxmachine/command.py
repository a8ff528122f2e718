"""The command ``ptxmachine run``, which runs a kernel without a Python program."""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import re
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ptxmachine import PtxError, load
from ptxmachine.machine import Module

# Element type → format letter of the module `struct`, which has no letter for bf16. A bf16 value is
# packed as the upper 16 bits of an f32 value.
_LETTERS = {
    "f16": "e", "bf16": "", "f32": "f", "f64": "d", "i8": "b", "u8": "B", "i16": "h", "u16": "H",
    "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
}  # fmt: skip
_FILLS: dict[str, Callable[[int, random.Random], float]] = {
    "zeros": lambda n, draw: 0,
    "ones": lambda n, draw: 1,
    "range": lambda n, draw: n,
    "random": lambda n, draw: draw.randint(-8, 8) / 4,
}
_ALIGNMENT = 256
_ARRAY = re.compile(r"(\w+)\[(\d+)\](?:=(\w+))?")
_HELP = """\
One value for each parameter of the kernel, in order: a number, or an array such as f32[1024]=range.
The types are {types}. An array is filled with zeros, ones, range (0, 1, 2, …) or random (multiples
of 0.25 from -2 to 2). Without "=…", it holds nothing yet, and a read before a write is a fault.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``ptxmachine``.

    Args:
        arguments: The arguments; with None, the arguments of the process.

    Returns:
        The exit status: 0 without an error, 1 if the text or the kernel is wrong, and 2 if an
        argument is wrong.
    """
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except PtxError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError, struct.error) as error:
        print(f"ptxmachine: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ptxmachine", description="Run PTX on this CPU.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a kernel, and say what it did or what is wrong")
    run.add_argument("file", type=Path, metavar="KERNEL.ptx", help="a text of nvcc -ptx or Triton")
    run.add_argument("args", nargs="*", metavar="ARG", help=_HELP.format(types=", ".join(_LETTERS)))
    run.add_argument("--kernel", metavar="NAME", help="the kernel, where the text has several")
    run.add_argument("--grid", type=_sizes, default=(1,), metavar="X[,Y[,Z]]", help="blocks; 1")
    run.add_argument("--block", type=_sizes, default=None, metavar="X[,Y[,Z]]", help="threads; 32")
    run.add_argument("--cluster", type=_sizes, metavar="X[,Y[,Z]]", help="blocks of a cluster; 1")
    run.add_argument("--shared", type=int, default=0, help="bytes of dynamic shared memory; 0")
    run.add_argument("--seed", type=int, default=0, help="chooses the order of warps; 0: in turn")
    run.add_argument("--show", type=int, default=8, help="elements of each array to print; 8")
    run.add_argument("--json", action="store_true", help="print the counts and arrays as JSON")
    return parser


def _run(options: argparse.Namespace) -> None:
    module = load(options.file.read_text(encoding="utf-8"))
    name = _kernel(module, options.kernel)
    kernel = module.text.kernels[name]
    if len(options.args) != len(kernel.parameters):
        wanted = ", ".join(f"{p.name} ({8 * p.size} bits)" for p in kernel.parameters)
        raise ValueError(f"got {len(options.args)} values, {name} takes {wanted or 'none'}")
    draw = random.Random(0)
    values = [_value(argument, draw) for argument in options.args]
    arrays = {number: value for number, value in enumerate(values) if isinstance(value, _Array)}
    report = module.launch(
        name,
        options.grid,
        options.block or kernel.threads or (32,),
        [v.memory if isinstance(v, _Array) else v for v in values],
        cluster=options.cluster,
        dynamic_shared=options.shared,
        empty=[array.memory for array in arrays.values() if array.empty],
        seed=options.seed,
    )
    shown = {number: array.elements(options.show) for number, array in arrays.items()}
    if options.json:
        print(json.dumps({"kernel": name, "counts": report.counts, "arrays": shown}))
        return
    print(f"{name}: no fault")
    for pipe, count in report.counts["pipes"].items():
        if count:
            print(f"  {pipe:<12}{count:>12} instructions of warps")
    for what in ("global_bytes", "global_sectors", "shared_wavefronts", "barriers"):
        if report.counts[what]:
            print(f"  {what.replace('_', ' '):<18}{report.counts[what]:>6}")
    for number, elements in shown.items():
        more = ", …" if arrays[number].count > len(elements) else ""
        print(f"  argument {number} = {', '.join(f'{x:g}' for x in elements)}{more}")


def _kernel(module: Module, asked: str | None) -> str:
    names = module.kernels
    if asked is None and len(names) == 1:
        return names[0]
    if asked not in names:
        given = "got no name" if asked is None else f"got {asked!r}"
        raise ValueError(f"--kernel: {given}, allowed: {', '.join(names) or 'none: no kernel'}")
    return asked


class _Array:
    """The memory of an array that is an argument of the kernel.

    Args:
        kind: Type of the elements, such as ``"f32"``.
        count: Number of elements.
        fill: Name of the fill, a key of ``_FILLS``, or None for an uninitialized array.
        draw: Generator of random numbers.
    """

    def __init__(self, kind: str, count: int, fill: str | None, draw: random.Random) -> None:
        self.kind, self.count, self.empty = kind, count, fill is None
        self.letter = _LETTERS[kind] or "f"
        self.size = 2 if kind == "bf16" else struct.calcsize(self.letter)
        # The alignment is that of GPU allocations, because the number of sectors depends on it.
        raw = (ctypes.c_char * (count * self.size + _ALIGNMENT))()
        begin = -ctypes.addressof(raw) % _ALIGNMENT
        self.memory = memoryview(raw).cast("B")[begin : begin + count * self.size]
        value = _FILLS[fill or "zeros"]
        for n in range(count):
            x = value(n, draw)
            element = struct.pack(f"<{self.letter}", x if self.letter in "efd" else int(x))
            self.memory[n * self.size : (n + 1) * self.size] = element[-self.size :]

    def elements(self, most: int) -> list[float]:
        """Return the first elements, at most `most`."""
        size, padding = self.size, bytes(struct.calcsize(self.letter) - self.size)
        starts = range(0, min(most, self.count) * size, size)
        raw = [padding + bytes(self.memory[start : start + size]) for start in starts]
        return [struct.unpack(f"<{self.letter}", element)[0] for element in raw]


def _value(argument: str, draw: random.Random) -> Any:
    """Return the number or the array that an argument describes."""
    match = _ARRAY.fullmatch(argument)
    if match is not None:
        kind, count, fill = match.groups()
        if kind not in _LETTERS:
            raise ValueError(f"{argument}: got {kind}, allowed: {', '.join(_LETTERS)}")
        if fill is not None and fill not in _FILLS:
            raise ValueError(f"{argument}: got {fill}, allowed: {', '.join(_FILLS)}")
        return _Array(kind, int(count), fill, draw)
    for convert in (lambda text: int(text, 0), float):
        try:
            return convert(argument)
        except ValueError:
            continue
    raise ValueError(f"got {argument!r}, allowed: a number, or an array such as f32[1024]=range")


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
