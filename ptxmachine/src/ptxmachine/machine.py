"""Run PTX on the CPU: load a module, launch its kernels, and return the counts of a launch."""

from __future__ import annotations

import ctypes
import math
import numbers
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ptxmachine import _machine, buffers, limits
from ptxmachine.body import Kernel, Operand
from ptxmachine.declarations import Variable
from ptxmachine.errors import PtxFault, PtxSyntaxError
from ptxmachine.parse import Text, parse

SHARED_BASE = 1024
ACCUMULATE = ("forward", "reverse", "exact", "truncate")


@dataclass(frozen=True)
class Report:
    """The counts of a launch.

    Attributes:
        counts: Instructions that warps executed, by the hardware unit (pipe) that executes them;
            bytes and sectors of global memory; wavefronts of shared memory; barriers; and stores
            whose value is lost because another lane of the same instruction stored a different
            value to the same address.
    """

    counts: dict[str, Any]


class _Places(NamedTuple):
    """The addresses of the variables of a kernel.

    Attributes:
        addresses: The address of each variable by its name.
        static_shared: Bytes of static shared memory.
        dynamic: Offset of the dynamic shared memory in shared memory.
        local: Bytes of local memory per thread.
    """

    addresses: dict[str, int]
    static_shared: int
    dynamic: int
    local: int


class Module:
    """A PTX module whose kernels run on the CPU. Use `load` to make a module."""

    def __init__(self, text: Text) -> None:
        """Store a parsed text, and allocate its global variables."""
        self.text = text
        self._variables = {v.name: v for v in text.variables}
        self._globals: dict[str, ctypes.Array[ctypes.c_char]] = {}
        size = 0
        for variable in text.variables:
            if variable.space in ("global", "const") and not variable.external:
                size += variable.size
                limits.at_most(size, limits.GLOBAL, "bytes of variables", variable.line)
                self._globals[variable.name] = _memory_of(variable)
        self._programs: dict[str, tuple[Any, int, int]] = {}

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels."""
        return list(self.text.kernels)

    def static_shared(self, name: str) -> int:
        """Return the number of bytes of static shared memory that a kernel has."""
        return self._places(self.text.kernels[name]).static_shared

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int] | None,
        args: Sequence[Any],
        *,
        cluster: Sequence[int] | None = None,
        dynamic_shared: int = 0,
        memory: Sequence[Any] = (),
        empty: Sequence[Any] = (),
        seed: int = 0,
        approximate: float = 0.0,
        accumulate: str = "forward",
        races: bool = True,
        count: bool = True,
        limit: int = 0,
        threads: int | None = None,
        blocks: Sequence[int] = (),
    ) -> Report:
        """Run a kernel, which reads and writes the arrays in place.

        Args:
            name: Name of the kernel.
            grid: Blocks in x, y and z.
            block: Threads per block in x, y and z. With None, the block has the threads that the
                kernel requires (``.reqntid``), or else one thread.
            args: One value per parameter: an array, an address or None for a pointer parameter, a
                number for a numeric parameter, and bytes for a struct. An array is an object with
                the buffer protocol, or with DLPack in the memory of the CPU.
            cluster: Blocks per cluster in x, y and z. With None, a cluster has the blocks that the
                kernel requires (``.reqnctapercluster``), or else one block.
            dynamic_shared: Bytes of dynamic shared memory. The launch sets the attribute
                ``MaxDynamicSharedMemorySize`` of the kernel to this number, as the launcher of
                Triton does. The sum of static and dynamic shared memory therefore has only the
                limit of the architecture.
            memory: Further arrays that the kernel accesses through addresses inside structs.
            empty: Arrays whose contents are uninitialized. It is a fault if the kernel uses a byte
                of such an array before it has written the byte.
            seed: Chooses the interleaving of warps and the moment at which asynchronous operations
                take effect. With 0, warps run one after another, and asynchronous operations take
                effect at issue.
            approximate: Error of approximate instructions, as a share of the largest error that the
                PTX manual documents, from -1 to 1.
            accumulate: Order of the sums in matrix instructions: ``"forward"``, ``"reverse"``,
                ``"exact"`` (rounded once) or ``"truncate"`` (rounded toward zero).
            races: Whether races and missing fences are detected.
            count: Whether sectors and wavefronts are counted.
            limit: Largest number of instructions that a warp may execute; 0 sets no limit.
            threads: Number of CPU threads; with None, one thread per available processor.
            blocks: Numbers of the blocks to run, which count along x first. The other blocks of
                their clusters run, too. If `blocks` is empty, the whole grid runs. The counts are
                those of the blocks that ran.

        Returns:
            The counts of the launch.

        Raises:
            PtxSyntaxError: If the kernel cannot be read, if it has an instruction that the machine
                does not know, or if operands do not fit their instruction.
            PtxFault: If the kernel does something that is wrong on a GPU.
            ValueError: If an argument has a wrong value, or does not fit its parameter.
        """
        if name not in self.text.kernels:
            raise ValueError(f"name: got {name!r}, allowed: {', '.join(self.kernels)}")
        if accumulate not in ACCUMULATE:
            raise ValueError(f"accumulate: got {accumulate!r}, allowed: {', '.join(ACCUMULATE)}")
        if not isinstance(approximate, (int, float)) or not -1 <= approximate <= 1:
            raise ValueError(f"approximate: got {approximate!r}, allowed: -1 to 1")
        _whole(seed, "seed", 0, 2**64 - 1)
        _whole(limit, "limit", 0, 2**63 - 1)
        _whole(dynamic_shared, "dynamic_shared", 0, limits.most_shared(self.text.target))
        if threads is not None:
            _whole(threads, "threads", 1, 1024)
        sizes = _three(grid, "grid", limits.GRID)
        if math.prod(sizes) > limits.BLOCKS:
            raise ValueError(f"grid: got {sizes}, allowed: at most {limits.BLOCKS} blocks")
        kernel = self.text.kernels[name]
        program, static_shared, local = self._program(kernel)
        self._check_shared(static_shared, dynamic_shared)
        given = block if block is not None else kernel.threads or (1, 1, 1)
        shape = _three(given, "block", limits.BLOCK)
        if math.prod(shape) > limits.THREADS:
            raise ValueError(f"block: got {shape}, allowed: at most {limits.THREADS} threads")
        if kernel.threads and shape != kernel.threads:
            raise ValueError(f"block: got {shape}, the kernel requires {kernel.threads}")
        if kernel.most_threads and math.prod(shape) > kernel.most_threads:
            raise ValueError(
                f"block: got {shape}, the kernel allows at most {kernel.most_threads} threads"
            )
        together = _cluster(kernel, cluster, sizes, self.text.target)
        values = [buffers.argument(value) for value in args]
        params = _parameters(kernel, values)
        size = math.prod(sizes)
        if not all(isinstance(number, int) and 0 <= number < size for number in blocks):
            raise ValueError(f"blocks: got {list(blocks)}, allowed: 0 to {size - 1}")
        reached = [value for value in values if isinstance(value, buffers.Buffer)]
        reached += [buffers.buffer(array, "memory") for array in memory]
        regions = buffers.regions(reached, [buffers.buffer(array, "empty") for array in empty])
        registers = _registers(kernel, math.prod(shape))
        counts, found = _machine.run(
            program, sizes, together, shape, params, static_shared + dynamic_shared,
            static_shared, local, [*regions, *self._variable_regions()], seed, float(approximate),
            ACCUMULATE.index(accumulate), races, count, limit,
            threads or len(os.sched_getaffinity(0)), list(blocks), registers,
        )  # fmt: skip
        if found is not None:
            raise self._fault(kernel, found)
        return Report(counts)

    def _check_shared(self, static: int, dynamic: int) -> None:
        """Raise ValueError unless a block can have `static + dynamic` bytes of shared memory."""
        most = limits.most_shared(self.text.target)
        if static + dynamic > most:
            raise ValueError(
                f"dynamic_shared: got {dynamic} bytes beside {static} bytes of static shared "
                f"memory, allowed: {most} bytes together for {self.text.target or 'no target'}"
            )

    def _fault(self, kernel: Kernel, found: tuple[str, str, int, int, int, int]) -> PtxFault:
        kind, message, at, block, warp, lane = found
        line = text = source = None
        if at >= 0:
            line, text = kernel.code[at].line, kernel.code[at].mnemonic
            if at in kernel.sources:
                file, row = kernel.sources[at]
                source = f"{os.path.basename(self.text.files.get(file, '?'))}:{row}"
        return PtxFault(kind, message, kernel.name, text or "", line, source, block, warp, lane)

    def _variable_regions(self) -> list[buffers.Region]:
        """Return the memory regions of the variables of the module."""
        return [
            buffers.Region(ctypes.addressof(data), len(data), writable, name, False)
            for name, data in self._globals.items()
            for writable in [self._variables[name].space == "global"]
        ]

    def _program(self, kernel: Kernel) -> tuple[Any, int, int]:
        """Return the decoded kernel, the offset of its dynamic shared memory, and its local bytes.

        The local bytes are the bytes of local memory per thread.
        """
        if kernel.name in self._programs:
            return self._programs[kernel.name]
        size = max((p.offset + p.size for p in kernel.parameters), default=0)
        most = limits.most_parameters(self.text.target, self.text.version)
        limits.at_most(size, most, f"bytes of the parameters of {kernel.name}", kernel.line)
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
        program = _machine.decode(code, kernel.registers)
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
        """Return the addresses of the variables of a kernel.

        A shared variable outside the kernels takes shared memory only in kernels that use it.
        """
        used = _names(kernel)
        addresses: dict[str, int] = {}
        ends = {"shared": SHARED_BASE, "local": 0}
        external: list[Variable] = []
        outside = [v for v in self.text.variables if v.space != "shared" or v.name in used]
        for variable in [*outside, *kernel.variables]:
            if variable.space not in ends:
                data = self._globals.get(variable.name)
                addresses[variable.name] = ctypes.addressof(data) if data is not None else 0
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
    """Parse a PTX text, and return its module.

    Args:
        text: The module, such as ``triton.compile(...).asm["ptx"]`` or the output of ``nvcc -ptx``.

    Returns:
        The module. `Module.launch` runs its kernels. A kernel is read when it is first launched.

    Raises:
        PtxSyntaxError: If the text outside the kernels cannot be read.
    """
    return Module(parse(text))


def _whole(value: int, name: str, low: int, high: int) -> None:
    """Raise ValueError unless `value` is an integer from `low` to `high`."""
    if not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: got {value!r}, allowed: integers from {low} to {high}")


def _three(sizes: Sequence[int], name: str, most: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return `sizes` in x, y and z, with 1 for a missing size, or raise ValueError."""
    if not 1 <= len(sizes) <= 3 or any(size < 1 for size in sizes):
        raise ValueError(f"{name}: got {tuple(sizes)}, allowed: 1 to 3 sizes of at least 1")
    if any(size > limit for size, limit in zip(sizes, most, strict=False)):
        raise ValueError(f"{name}: got {tuple(sizes)}, allowed: at most {most}")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _cluster(
    kernel: Kernel, given: Sequence[int] | None, grid: tuple[int, int, int], target: str
) -> tuple[int, int, int]:
    """Return the blocks per cluster in x, y and z, or raise ValueError if they are not allowed."""
    if given is None and kernel.explicit_cluster and kernel.cluster is None:
        raise ValueError(f"cluster: got None, and {kernel.name} has .explicitcluster")
    asked = given if given is not None else kernel.cluster or (1, 1, 1)
    most = limits.CLUSTER
    if kernel.most_cluster is not None:
        most = min(most, kernel.most_cluster)
    x, y, z = _three(asked, "cluster", (most, most, most))
    if kernel.cluster and (x, y, z) != kernel.cluster:
        raise ValueError(f"cluster: got {(x, y, z)}, the kernel requires {kernel.cluster}")
    if x * y * z > most:
        raise ValueError(f"cluster: got {(x, y, z)}, allowed: at most {most} blocks")
    if x * y * z > limits.most_cluster(target):
        raise ValueError(f"cluster: got {(x, y, z)}, allowed for {target or 'no target'}: 1 block")
    if any(blocks % size for blocks, size in zip(grid, (x, y, z), strict=True)):
        raise ValueError(f"grid: got {grid}, allowed: multiples of the cluster {(x, y, z)}")
    return x, y, z


def _names(kernel: Kernel) -> set[str]:
    """Return the names of variables and labels in the operands of a kernel."""
    names: set[str] = set()
    operands = [o for i in kernel.code for o in i.operands]
    while operands:
        operand = operands.pop()
        operands.extend(operand.parts)
        if operand.kind == "s":
            names.add(str(operand.value))
    return names


def _registers(kernel: Kernel, threads: int) -> int:
    """Return the registers per thread at the start of a kernel that has setmaxnreg.

    ptxas gives a thread as many registers as the directives of the kernel allow, and at most as
    many as the largest setmaxnreg.inc requests. If no directive bounds the registers, ptxas ignores
    setmaxnreg, and the result is 0. The result is also 0 for a kernel without setmaxnreg, because
    its text does not say how many registers ptxas gives to a thread.

    Raises:
        PtxFault: If a block with this number of threads needs more registers than a
            multiprocessor has.
    """
    moves = [i for i in kernel.code if i.mnemonic.startswith("setmaxnreg.")]
    if not moves:
        return 0
    bounds = [limits.THREAD_REGISTERS]
    if kernel.most_registers:
        bounds.append(kernel.most_registers)
    elif not (kernel.most_threads and kernel.least_blocks):
        return 0
    if kernel.most_threads:
        warps = -(-kernel.most_threads // 32)
        bounds.append(limits.BLOCK_REGISTERS // (32 * warps * max(kernel.least_blocks, 1)))
    taken = [int(i.operands[0].value) for i in moves if i.mnemonic.startswith("setmaxnreg.inc")]
    unit = limits.REGISTER_UNIT
    registers = min(bounds + ([max(taken)] if taken else [])) // unit * unit
    warps = -(-threads // (32 * limits.WARP_UNIT)) * limits.WARP_UNIT
    if 32 * warps * registers > limits.BLOCK_REGISTERS:
        raise PtxFault(
            "registers", f"a block of {threads} threads needs {32 * warps * registers} registers, "
            f"{registers} for each thread of {warps} warps, and a multiprocessor has "
            f"{limits.BLOCK_REGISTERS}", kernel.name, "", None, None, -1, -1, -1,
        )  # fmt: skip
    return registers


def _parameters(kernel: Kernel, args: Sequence[Any]) -> bytes:
    """Return the bytes of the parameters of a kernel, filled with the arguments `args`."""
    if len(args) != len(kernel.parameters):
        raise ValueError(
            f"args: got {len(args)} values, {kernel.name} has {len(kernel.parameters)}"
        )
    data = bytearray(sum(p.size + p.align for p in kernel.parameters))
    for parameter, value in zip(kernel.parameters, args, strict=True):
        if isinstance(value, buffers.Buffer):
            raw = struct.pack("<Q", value.address)
        elif isinstance(value, bytes):
            raw = value
        elif isinstance(value, numbers.Integral):
            raw = (int(value) % (1 << (8 * parameter.size))).to_bytes(parameter.size, "little")
        elif isinstance(value, numbers.Real):
            try:
                raw = struct.pack("<d" if parameter.size == 8 else "<f", float(value))
            except OverflowError:
                message = f"args: got {value} for {parameter.name}, which has 32 bits"
                raise ValueError(message) from None
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


def _memory_of(variable: Variable) -> ctypes.Array[ctypes.c_char]:
    """Allocate memory for a variable with its alignment, and write its initial value."""
    size, align = max(variable.size, 1), max(variable.align, 16)
    raw = (ctypes.c_char * (size + align))()
    data = (ctypes.c_char * size).from_buffer(raw, -ctypes.addressof(raw) % align)
    ctypes.memmove(data, variable.initial, len(variable.initial))
    return data
