"""Count the instructions of an operation's launches at real shapes, from a sample of the blocks.

The PTX machine executes only some blocks of each grid, spread over the grid. Every other block is
assumed to have the mean counts of the executed blocks. If the blocks do unequal work, more blocks
run. The results of the operation are wrong, because most blocks do not run. A launch of a single
block always runs completely, so that the row order of the cross entropy, on which later launches
depend, is right.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import math
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from ptxmachine.parse import parse
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastbert import ops
from fastbert.ops.register import IMPLEMENTATIONS
from fastbert.testing.ahead_of_time import identity
from fastbert.testing.cases import Case
from fastbert.testing.launches import GEMMS
from fastbert.testing.machine_code import functions
from fastbert.testing.ptx import sass
from fastbert.testing.ptx.cuda_library import readable
from fastbert.testing.ptx.cuda_operators import CompiledOperators, serving_cuda
from fastbert.testing.ptx.hopper_attention import path_of_a_tile
from fastbert.testing.ptx.triton_launches import Binary, Emulator, serving_triton
from ptxmachine import Report

# PROBED blocks run one by one. If one of them executes more than UNEQUAL times as many instructions
# as another, MORE blocks run.
PROBED, MORE, UNEQUAL = 24, 240, 1.25
# Nearly all instructions of these kernels are in one loop, whose path can be read from the machine
# code.
HOPPER_ATTENTION = (
    "attention_forward.persistent_forward_kernel", "attention_backward.persistent_backward_kernel",
    "attention_backward_wide.persistent_backward_kernel",
)  # fmt: skip
# Multiples of the golden ratio, modulo 1, are spread evenly and do not coincide with a period of a
# grid.
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Counted:
    """Counts of a whole grid, scaled from the `sampled` blocks that ran."""

    sampled: int
    counts: dict[str, float]


@dataclass(frozen=True)
class Launched:
    """The counts of one launch on the whole grid.

    Args:
        name: Name of the launch, or "library" for a matrix product of torch.
        blocks: Blocks of the grid; 0 for a product of the library.
        sampled: Blocks that ran.
        counts: Counts of the PTX machine for all blocks, such as instructions by pipe; and
            ``sass_fma``, ``sass_alu``, ``sass_lsu`` and ``sass_issue``, from
            `fastbert.testing.ptx.sass`.
        bytes: Number of bytes of the launch's tensors, each counted once; or of the memory sectors
            that the launch accesses, if they have fewer bytes.
    """

    name: str
    blocks: int
    sampled: int
    counts: dict[str, float]
    bytes: float = 0.0

    @property
    def multiplies(self) -> bool:
        """Whether the launch has matrix instructions."""
        return self.counts.get("tensor_flops", 0) > 0


def spread(blocks: int, wanted: int) -> list[int]:
    """Return the numbers of at most `wanted` blocks that are spread over a grid of `blocks` blocks.

    Examples:
        >>> from fastbert.testing.ptx.sample import spread
        >>> spread(4, 24), spread(1000, 4)
        ([0, 2, 1, 3], [0, 618, 236, 854])
    """
    if blocks <= wanted:
        return sorted(range(blocks), key=lambda number: number * GOLDEN % 1)
    chosen: dict[int, None] = {}
    number = 0
    while len(chosen) < wanted:
        chosen[int(number * GOLDEN % 1 * blocks)] = None
        number += 1
    return list(chosen)


def mean_counts(run: Callable[[list[int]], dict[str, float]], blocks: int) -> Counted:
    """Run blocks that are spread over a grid, and scale their counts to the whole grid.

    Args:
        run: Function that runs the blocks with some numbers, and returns the sums of their counts.
        blocks: Blocks of the grid.
    """
    chosen = spread(blocks, PROBED)
    probes = [run([block]) for block in chosen]
    lengths = [probe["instructions"] for probe in probes]
    if max(lengths) > UNEQUAL * min(lengths) and blocks > PROBED:
        chosen = spread(blocks, MORE)
        probes = [run(chosen)]
    total: Counter[str] = Counter()
    for probe in probes:
        total.update(probe)
    scale = blocks / len(chosen)
    return Counted(len(chosen), {key: value * scale for key, value in total.items()})


class _Library(TorchDispatchMode):
    """A mode that reports the FLOPs and the bytes of each matrix product of torch.

    Like the mode of `fastbert.testing.launches`, it calls the implementations of fastbert's
    operators itself, because the dispatcher would run them outside the mode.
    """

    def __init__(self, report: Callable[[float, float], None]) -> None:
        super().__init__()
        self.report = report

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:
            if func.namespace == "fastbert":
                return IMPLEMENTATIONS[func._opname](*args)
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        if func._opname in GEMMS:
            tensors = [x for x in args if isinstance(x, Tensor)]
            size = sum(x.numel() * x.itemsize for x in (*tensors, result))
            self.report(2.0 * result.numel() * tensors[-1].shape[-2], float(size))
        return result


def count(
    case: Case, dtype: torch.dtype, arch: int, multiprocessors: int, backend: str = "triton"
) -> dict[str, list[Launched]]:
    """Run a case forward and backward, and count the work of each launch.

    Args:
        case: The case, at its true shape.
        dtype: Dtype of the inputs.
        arch: Architecture for which the kernels are compiled: 80, 89 or 90.
        multiprocessors: Number of multiprocessors of the GPU, from which some launches compute
            their grid.
        backend: "triton" or "cuda".

    Returns:
        The launches by direction: "forward" and "backward".

    Raises:
        PtxFault: If the PTX machine finds a fault in a kernel.
    """
    found: dict[str, list[Launched]] = {"forward": [], "backward": []}
    direction = "forward"

    def note(launched: Launched) -> None:
        found[direction].append(launched)

    def note_product(flops: float, size: float) -> None:
        note(Launched("library", 0, 0, {"tensor_flops": flops}, size))

    sampled = _sampled_cuda(arch, note)
    if backend == "triton":
        sampled = _sampled(arch, multiprocessors, note)
    with sampled, _Library(note_product):
        inputs = case.inputs(dtype)
        leaves = inputs.map(
            lambda name, v: (
                v.detach().requires_grad_(name in inputs.gradients) if isinstance(v, Tensor) else v
            )
        )
        function = getattr(ops, case.op)
        out = function(*leaves.positional.values(), **leaves.keyword, backend=backend)
        named = dict(leaves.items())
        direction = "backward"
        torch.autograd.grad(out, [named[name] for name in inputs.gradients], torch.ones_like(out))
    return found


@contextmanager
def _sampled(arch: int, multiprocessors: int, note: Callable[[Launched], None]) -> Iterator[None]:
    """Run some blocks of each Triton launch on the PTX machine; pass scaled counts to `note`."""
    known: dict[tuple[str, tuple[int, ...]], Counted] = {}

    def counted(launch: Any, on: Tensor | None) -> Counted:
        def run(blocks: list[int]) -> dict[str, float]:
            emulator = Emulator(arch, races=False, blocks=blocks)
            emulator.run(launch, on)
            counts = emulator.reports[0][1].counts
            return {**counts["pipes"], **{k: v for k, v in counts.items() if k != "pipes"}}

        found = mean_counts(run, math.prod(launch.grid))
        binary = Emulator(arch).binary(launch)
        found.counts.update(_machine_code(binary, found.counts["instructions"]))
        return found

    def run(launch: Any, on: Tensor) -> None:
        if min(launch.grid) == 0:
            return
        # A launch with a known binary and grid does the same work on other data, so the counts are
        # reused. A launch of a single block is counted each time.
        key = identity(launch), launch.grid
        if key not in known or launch.grid == (1,):
            known[key] = counted(launch, on)
        note(launched(launch.name, math.prod(launch.grid), known[key], launch.arguments.values()))

    importlib.import_module("fastbert.kernels.attention")
    modules = [m for n, m in sys.modules.items() if n.startswith("fastbert.kernels.")]
    with serving_triton(arch, run), ExitStack() as stack:
        for module in modules:
            if hasattr(module, "multiprocessors"):
                patch = mock.patch.object(module, "multiprocessors", return_value=multiprocessors)
                stack.enter_context(patch)
        yield


@contextmanager
def _sampled_cuda(arch: int, note: Callable[[Launched], None]) -> Iterator[None]:
    """Run some blocks of each CUDA C++ launch on the PTX machine; pass scaled counts to `note`.

    The field `bytes` of a launch is the size of all sectors of memory that the launch accesses.
    """
    operators, codes = _compiled_cuda(arch)
    lengths = {
        name: len(module.text.kernels[name].code)
        for module in operators.compiled.modules
        for name in module.kernels
    }

    def on_launch(kernel: str, grid: list[int], run: Callable[..., Report]) -> None:
        def counted(blocks: list[int]) -> dict[str, float]:
            counts = run(races=False, blocks=blocks).counts
            return {**counts["pipes"], **{k: v for k, v in counts.items() if k != "pipes"}}

        found = mean_counts(counted, math.prod(grid))
        name = readable(kernel)
        if name in HOPPER_ATTENTION:
            path = path_of_a_tile(codes[kernel])
            mix = sass.mix_of_path(path, found.counts["tensor_flops"])
        else:
            mix = sass.corrected(
                found.counts["instructions"], lengths[kernel], sass.mix(codes[kernel])
            )
        found.counts.update({f"sass_{unit}": number for unit, number in mix.items()})
        size = 32.0 * found.counts["global_sectors"]
        note(Launched(name, math.prod(grid), found.sampled, found.counts, size))

    operators.compiled.on_launch = on_launch
    with serving_cuda(operators):
        yield


@functools.cache
def _compiled_cuda(arch: int) -> tuple[CompiledOperators, dict[str, str]]:
    """Return the operators of csrc/cuda, and the machine code of each kernel."""
    folder = Path(tempfile.mkdtemp(prefix="fastbert-cuda-"))
    atexit.register(shutil.rmtree, folder)
    operators = CompiledOperators(folder, arch)
    codes: dict[str, str] = {}
    for ptx in folder.glob("*/*.ptx"):
        cubin = ptx.with_suffix(".cubin")
        command = ["ptxas", f"-arch=sm_{operators.compiled.arch}", str(ptx), "-o", str(cubin)]
        subprocess.run(command, check=True, capture_output=True)
        codes |= functions(sass.disassemble(cubin.read_bytes()))
    return operators, codes


@functools.cache
def _mixes(ptx: str, cubin: bytes) -> tuple[int, dict[str, int]]:
    """Return the number of a kernel's PTX instructions, and the `mix` of its machine code."""
    [kernel] = parse(ptx).kernels.values()
    return len(kernel.code), sass.mix(sass.disassemble(cubin))


def _machine_code(binary: Binary, instructions: float) -> dict[str, float]:
    length, mix = _mixes(binary.ptx, binary.cubin)
    return {f"sass_{u}": n for u, n in sass.corrected(instructions, length, mix).items()}


def launched(name: str, blocks: int, found: Counted, arguments: Iterable[Any]) -> Launched:
    """Return the `Launched` of a launch from its scaled counts `found` and its arguments.

    In the number of bytes, tensors that share memory count once.
    """
    storages = {
        x.untyped_storage().data_ptr(): x.numel() * x.itemsize
        for x in arguments
        if isinstance(x, Tensor)
    }
    size = min(float(sum(storages.values())), 32.0 * found.counts["global_sectors"])
    return Launched(name, blocks, found.sampled, found.counts, size)
