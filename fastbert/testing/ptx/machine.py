"""Run PTX on the CPU: load a module, launch a kernel, read the report."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.testing.ptx import limits
from fastbert.testing.ptx.body import Kernel, Operand
from fastbert.testing.ptx.declarations import Variable
from fastbert.testing.ptx.errors import PtxFault, PtxSyntaxError
from fastbert.testing.ptx.parse import Text, parse

SHARED_BASE = 1024
# The registers of a multiprocessor, and the most of a thread.
REGISTERS, MOST_REGISTERS = 65_536, 256
MOST_BLOCKS = 2**31 - 1
ACCUMULATE = ("forward", "reverse", "exact", "truncate")


@dataclass(frozen=True)
class Report:
    """What a launch did.

    Attributes:
        counts: Dynamic instructions of warps by pipe, bytes and sectors of global memory,
            wavefronts of shared memory, barriers, and stores of lanes that another lane overwrote
            with another value in the same instruction.
    """

    counts: dict[str, Any]


class _Places(NamedTuple):
    """Where the variables of a kernel are.

    Attributes:
        addresses: The address of each variable by its name.
        static_shared: Bytes of static shared memory.
        dynamic: Offset of the dynamic shared memory.
        local: Bytes of local memory.
    """

    addresses: dict[str, int]
    static_shared: int
    dynamic: int
    local: int


class Module:
    """A PTX module whose kernels run on the CPU; `load` makes one."""

    def __init__(self, text: Text) -> None:
        """Keep a parsed text, and allocate its global variables."""
        self.text = text
        self._variables = {v.name: v for v in text.variables}
        self._globals: dict[str, Tensor] = {}
        size = 0
        for variable in text.variables:
            if variable.space in ("global", "const") and not variable.external:
                size += variable.size
                limits.at_most(size, limits.GLOBAL, "bytes of variables", variable.line)
                data = bytearray(max(variable.size, 1))
                data[: len(variable.initial)] = variable.initial
                self._globals[variable.name] = torch.frombuffer(data, dtype=torch.uint8)
        self._programs: dict[str, tuple[Any, int, int]] = {}

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels."""
        return list(self.text.kernels)

    def static_shared(self, name: str) -> int:
        """Return the bytes of static shared memory of a kernel."""
        return self._places(self.text.kernels[name]).static_shared

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int] | None,
        args: Sequence[Any],
        *,
        dynamic_shared: int = 0,
        memory: Sequence[Tensor] = (),
        empty: Sequence[Tensor] = (),
        seed: int = 0,
        approximate: float = 0.0,
        accumulate: str = "forward",
        races: bool = True,
        count: bool = True,
        limit: int = 0,
        threads: int | None = None,
        blocks: Sequence[int] = (),
    ) -> Report:
        """Run a kernel; its tensors are read and written in place.

        Args:
            name: Name of the kernel.
            grid: Blocks in x, y and z.
            block: Threads of a block in x, y and z; None takes those that the kernel requires.
            args: One value per parameter: a CPU tensor or an address for a pointer, a number, or
                bytes for a struct.
            dynamic_shared: Bytes of dynamic shared memory.
            memory: Tensors that the kernel reaches through addresses in structs.
            empty: Tensors that hold nothing yet. A read before the kernel has written is a fault.
            seed: Chooses the interleaving of warps and the time at which asynchronous operations
                take effect. With 0, warps run one after another and operations take effect at
                issue.
            approximate: Share of the documented error that approximate instructions make, -1 to 1.
            accumulate: Order of the sums in matrix instructions: ``"forward"``, ``"reverse"``,
                ``"exact"`` (rounded once) or ``"truncate"`` (rounded toward zero).
            races: Whether races are looked for.
            count: Whether sectors and wavefronts are counted.
            limit: Instructions that a warp may execute; 0 sets no limit.
            threads: Threads of the CPU; None takes one per processor.
            blocks: Numbers of the blocks that run, x fastest; empty runs the whole grid. The counts
                are then those of the chosen blocks.

        Returns:
            The counts of the launch.

        Raises:
            PtxSyntaxError: If the kernel cannot be read, if it has an instruction that the machine
                does not know, or if operands do not fit their instruction.
            PtxFault: If the kernel does something wrong.
            ValueError: If an argument does not fit.
        """
        if name not in self.text.kernels:
            raise ValueError(f"name: got {name!r}, allowed: {', '.join(self.kernels)}")
        if accumulate not in ACCUMULATE:
            raise ValueError(f"accumulate: got {accumulate!r}, allowed: {', '.join(ACCUMULATE)}")
        if not isinstance(approximate, (int, float)) or not -1 <= approximate <= 1:
            raise ValueError(f"approximate: got {approximate!r}, allowed: -1 to 1")
        _whole(seed, "seed", 0, 2**64 - 1)
        _whole(limit, "limit", 0, 2**63 - 1)
        _whole(dynamic_shared, "dynamic_shared", 0, limits.SHARED)
        if threads is not None:
            _whole(threads, "threads", 1, 1024)
        sizes = _three(grid, "grid")
        if math.prod(sizes) > MOST_BLOCKS:
            raise ValueError(f"grid: got {sizes}, allowed: at most {MOST_BLOCKS} blocks")
        kernel = self.text.kernels[name]
        program, static_shared, local = self._program(kernel)
        shape = _three(block if block is not None else kernel.threads or (1, 1, 1), "block")
        if math.prod(shape) > limits.THREADS:
            raise ValueError(f"block: got {shape}, allowed: at most {limits.THREADS} threads")
        if kernel.threads and shape != kernel.threads:
            raise ValueError(f"block: got {shape}, the kernel requires {kernel.threads}")
        if kernel.most_threads and math.prod(shape) > kernel.most_threads:
            raise ValueError(
                f"block: got {shape}, the kernel allows at most {kernel.most_threads} threads"
            )
        params = _parameters(kernel, args)
        size = math.prod(sizes)
        if not all(isinstance(number, int) and 0 <= number < size for number in blocks):
            raise ValueError(f"blocks: got {list(blocks)}, allowed: 0 to {size - 1}")
        tensors = [a for a in args if isinstance(a, Tensor)] + list(memory)
        from fastbert import _C

        counts, found = _C.ptx_run(
            program, sizes, shape, params, static_shared + dynamic_shared,
            static_shared, local, self._regions(tensors, empty), seed, float(approximate),
            ACCUMULATE.index(accumulate), races, count, limit,
            threads or len(os.sched_getaffinity(0)), list(blocks), _registers(kernel),
        )  # fmt: skip
        if found is not None:
            raise self._fault(kernel, found)
        return Report(counts)

    def _fault(self, kernel: Kernel, found: tuple[str, str, int, int, int, int]) -> PtxFault:
        kind, message, at, block, warp, lane = found
        line = text = source = None
        if at >= 0:
            line, text = kernel.code[at].line, kernel.code[at].mnemonic
            if at in kernel.sources:
                file, row = kernel.sources[at]
                source = f"{os.path.basename(self.text.files.get(file, '?'))}:{row}"
        return PtxFault(kind, message, kernel.name, text or "", line, source, block, warp, lane)

    def _regions(
        self, tensors: Sequence[Tensor], empty: Sequence[Tensor]
    ) -> list[tuple[int, int, bool, str, bool]]:
        """Return address, bytes, whether it may be written, name, and whether it holds nothing."""
        nothing = {t.untyped_storage().data_ptr() for t in empty}
        regions: dict[int, tuple[int, int, bool, str, bool]] = {}
        for number, tensor in enumerate([*tensors, *empty]):
            if tensor.device.type != "cpu":
                raise ValueError(f"args: got a tensor on {tensor.device}, allowed: the CPU")
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if storage.nbytes():
                name = f"tensor {number} {tuple(tensor.shape)}"
                regions.setdefault(
                    address, (address, storage.nbytes(), True, name, address in nothing)
                )
        for name, tensor in self._globals.items():
            writable = self._variables[name].space == "global"
            regions[tensor.data_ptr()] = (
                tensor.data_ptr(), tensor.numel(), writable, name, False,
            )  # fmt: skip
        return list(regions.values())

    def _program(self, kernel: Kernel) -> tuple[Any, int, int]:
        """Return the decoded kernel, the start of its dynamic shared memory, and local bytes."""
        if kernel.name in self._programs:
            return self._programs[kernel.name]
        from fastbert import _C

        places = self._places(kernel)
        addresses = places.addresses
        window = 0x0400000000000000
        addresses.update({p.name: p.offset for p in kernel.parameters})
        in_parameters = {p.name for p in kernel.parameters}

        def placed(o: Operand, line: int, *, moved: bool) -> Operand:
            if o.kind == "s":
                if o.value not in addresses:
                    raise PtxSyntaxError(f"the name {o.value} is not known", line)
                base = addresses[str(o.value)] + o.offset
                base = base | window if moved and o.value in in_parameters else base
                return Operand("i", base, negated=o.negated)
            if o.parts:
                parts = tuple(placed(part, line, moved=moved) for part in o.parts)
                return o._replace(parts=parts)
            return o

        code = [
            (
                i.mnemonic,
                [placed(o, i.line, moved=i.mnemonic.startswith("mov")) for o in i.operands],
                i.guard,
                i.negated,
                i.line,
            )
            for i in kernel.code
        ]
        program = _C.ptx_decode(code, kernel.registers)
        if program.unsupported:
            found = "; ".join(f"line {line}: {text}" for line, text in program.unsupported[:8])
            raise PtxSyntaxError(
                f"{kernel.name}: the PTX machine does not know {len(program.unsupported)} "
                f"instructions: {found}",
                program.unsupported[0][0],
            )
        if program.misfits:
            line, text = program.misfits[0]
            raise PtxSyntaxError(text, line)
        self._programs[kernel.name] = program, places.dynamic, places.local
        return self._programs[kernel.name]

    def _places(self, kernel: Kernel) -> _Places:
        """Lay out the variables of a kernel."""
        addresses: dict[str, int] = {}
        ends = {"shared": SHARED_BASE, "local": 0}
        external: list[Variable] = []
        for variable in [*self.text.variables, *kernel.variables]:
            if variable.space not in ends:
                addresses[variable.name] = (
                    self._globals[variable.name].data_ptr() if variable.name in self._globals else 0
                )
            elif variable.external:
                external.append(variable)
            else:
                at = -(-ends[variable.space] // variable.align) * variable.align
                addresses[variable.name] = at
                ends[variable.space] = at + variable.size
                most = limits.MEMORY[variable.space] + (variable.space == "shared") * SHARED_BASE
                what = f"bytes of .{variable.space} variables"
                limits.at_most(ends[variable.space], most, what, variable.line)
        static = dynamic = ends["shared"] - SHARED_BASE
        if external:
            align = max(16, *(v.align for v in external))
            dynamic = -(-static // align) * align
            addresses.update({v.name: SHARED_BASE + dynamic for v in external})
        return _Places(addresses, static, dynamic, ends["local"])


def load(text: str) -> Module:
    """Parse a PTX text.

    Args:
        text: The module, as ``triton.compile(...).asm["ptx"]`` or ``nvcc -ptx`` gives it.

    Returns:
        The module, whose kernels `Module.launch` runs. A kernel is read when it is first launched.

    Raises:
        PtxSyntaxError: If the text outside the kernels cannot be read.
    """
    return Module(parse(text))


def _whole(value: int, name: str, low: int, high: int) -> None:
    """Raise ValueError unless an argument is an integer in a range."""
    if not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: got {value!r}, allowed: integers from {low} to {high}")


def _three(sizes: Sequence[int], name: str) -> tuple[int, int, int]:
    if not 1 <= len(sizes) <= 3 or any(size < 1 for size in sizes):
        raise ValueError(f"{name}: got {tuple(sizes)}, allowed: 1 to 3 sizes of at least 1")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _registers(kernel: Kernel) -> int:
    """Return the registers of a thread at the start of a kernel that has setmaxnreg.

    ptxas gives a thread as many as the bounds of the kernel leave, and no more than the kernel
    takes. Without such bounds ptxas ignores setmaxnreg, and the result is 0.
    """
    bounds = [MOST_REGISTERS]
    if kernel.most_registers:
        bounds.append(kernel.most_registers)
    elif not (kernel.most_threads and kernel.least_blocks):
        return 0
    if kernel.most_threads:
        warps = -(-kernel.most_threads // 32)
        bounds.append(REGISTERS // (32 * warps * max(kernel.least_blocks, 1)))
    taken = [
        int(i.operands[0].value) for i in kernel.code if i.mnemonic.startswith("setmaxnreg.inc")
    ]
    return min(bounds + ([max(taken)] if taken else [])) // 8 * 8


def _parameters(kernel: Kernel, args: Sequence[Any]) -> bytes:
    """Lay the arguments out as the kernel's parameters."""
    if len(args) != len(kernel.parameters):
        raise ValueError(
            f"args: got {len(args)} values, {kernel.name} has {len(kernel.parameters)}"
        )
    data = bytearray(sum(p.size + p.align for p in kernel.parameters))
    for parameter, value in zip(kernel.parameters, args, strict=True):
        if isinstance(value, Tensor):
            raw = struct.pack("<Q", value.data_ptr())
        elif isinstance(value, (bytes, bytearray)):
            raw = bytes(value)
        elif isinstance(value, float):
            try:
                raw = struct.pack("<d" if parameter.size == 8 else "<f", value)
            except OverflowError:
                message = f"args: got {value} for {parameter.name}, which has 32 bits"
                raise ValueError(message) from None
        elif isinstance(value, int):
            raw = (int(value) % (1 << (8 * parameter.size))).to_bytes(parameter.size, "little")
        elif value is None:
            raw = bytes(parameter.size)
        else:
            raise ValueError(f"args: got a {type(value).__name__} for {parameter.name}")
        if len(raw) != parameter.size:
            raise ValueError(
                f"args: got {len(raw)} bytes for {parameter.name}, which has {parameter.size}"
            )
        data[parameter.offset : parameter.offset + parameter.size] = raw
    return bytes(data)
