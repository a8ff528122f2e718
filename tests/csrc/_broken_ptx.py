"""Insert a mistake into PTX that nvcc generated, and tell which kind of error it causes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.testing.ptx.cuda_library import CudaLibrary
from ptxmachine import PtxFault, load

# Largest number of instructions of a warp; for the tests' small inputs, a correct kernel executes
# far fewer.
LONGEST = 200_000


class Fault(NamedTuple):
    """A mistake that a test inserts into PTX.

    Args:
        name: Name of the mistake.
        old: Regular expression that matches the text to change, inside one kernel.
        new: Replacement of the text, as in `re.sub`.
        which: Numbers, from 0, of the matches to change; an empty tuple changes all matches.
    """

    name: str
    old: str
    new: str
    which: tuple[int, ...] = ()

    def broken(self, ptx: str) -> str:
        """Return the PTX with this mistake, or raise ValueError if `old` does not match."""
        matches = list(re.finditer(self.old, ptx))
        chosen = [matches[i] for i in self.which] if self.which else matches
        if not chosen:
            raise ValueError(f"{self.name}: the PTX has no such instruction")
        for match in sorted(chosen, key=re.Match.start, reverse=True):
            ptx = ptx[: match.start()] + match.expand(self.new) + ptx[match.end() :]
        return ptx


def kernel_in(path: Path, *parts: str) -> str:
    """Return the PTX of the file's only kernel whose mangled name contains all `parts`."""
    header, *kernels = re.split(r"(?m)^(?=\.entry)", path.read_text(encoding="utf-8"))
    [text_of_kernel] = [
        text for text in kernels if all(part in text.split("(")[0] for part in parts)
    ]
    return header + text_of_kernel


@contextmanager
def replaced(library: CudaLibrary, text: str) -> Iterator[None]:
    """Run the PTX `text` instead of the library's own kernel inside the ``with`` block."""
    modules, other = library.modules, load(text)
    [number] = [i for i, m in enumerate(modules) if set(other.kernels) <= set(m.kernels)]
    before, modules[number] = modules[number], other
    try:
        yield
    finally:
        modules[number] = before


def outcome(
    run: Callable[[int], Sequence[Tensor]], expected: Sequence[Tensor], seeds: int = 4
) -> str:
    """Return the kind of the first error, "result" for a wrong result, or "" if all are right.

    The calls of `run` have the seeds from 0; the first seed with an error ends the calls.
    """
    for seed in range(seeds):
        try:
            results = run(seed)
        except PtxFault as fault:
            return fault.kind
        if not all(map(torch.equal, results, expected)):
            return "result"
    return ""
