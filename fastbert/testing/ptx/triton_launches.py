"""Compile the Triton launches of fastbert to PTX and run them on the PTX machine."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor

from fastbert.ops import backend as backends
from fastbert.testing.ahead_of_time import specialise
from ptxmachine import Module, PtxFault, Report, load

STAND_IN = "the PTX machine"


class Binary(NamedTuple):
    """A compiled launch.

    Args:
        ptx: The text of the PTX, which contains one kernel.
        names: Names of the arguments that are parameters of the kernel, in order.
        warps: Warps of a block.
        shared: Bytes of dynamic shared memory of a block.
        cubin: The machine code that ptxas makes from the text.
    """

    ptx: str
    names: tuple[str, ...]
    warps: int
    shared: int
    cubin: bytes


@functools.cache
def _loaded(text: str) -> Module:
    return load(text)


class Emulator:
    """Runs launches on the PTX machine, for one architecture.

    Args:
        arch: Architecture of the GPU, such as 90 for sm_90.
        options: Keyword arguments of `Module.launch`, such as ``seed`` or ``races``.

    Attributes:
        reports: Name and report of each launch so far.
        compile_seconds: Time that compilation has taken so far.
    """

    def __init__(self, arch: int, **options: Any) -> None:
        """Store the options of the launches."""
        self.arch = arch
        self.options = options
        self.reports: list[tuple[str, Report]] = []
        self.compile_seconds = 0.0

    def run(self, launch: Any, on: Tensor | None = None) -> None:
        """Compile a launch and run it on its tensors; an empty grid runs nothing.

        Raises:
            PtxFault: If the PTX machine finds a fault in the kernel. Unless the option ``races`` is
                False, it is also a fault if lanes of one instruction store different values to one
                address. A layout may hold an element in several lanes, but these lanes must have
                the same value.
        """
        if min(launch.grid) == 0:
            return
        start = time.monotonic()
        binary = self.binary(launch)
        self.compile_seconds += time.monotonic() - start
        module = _loaded(binary.ptx)
        [name] = module.kernels
        arguments = [launch.arguments[name] for name in binary.names]
        # A tensor that requires a gradient cannot be exported by DLPack.
        arguments = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
        # Triton appends the addresses of two scratch buffers, which the kernels of fastbert do not
        # use.
        report = module.launch(
            name, launch.grid, (32 * binary.warps, 1, 1), [*arguments, None, None],
            dynamic_shared=binary.shared, **self.options,
        )  # fmt: skip
        self.reports.append((launch.name, report))
        conflicts = report.counts["conflicting_stores"]
        if conflicts and self.options.get("races", True):
            raise PtxFault(
                "conflict", f"{conflicts} stores of two values to one address in one instruction",
                launch.name, "", None, None, -1, -1, -1,
            )  # fmt: skip

    def binary(self, launch: Any) -> Binary:
        """Compile a launch for the architecture of the emulator.

        Raises:
            ValueError: If the kernel needs scratch memory, which the machine does not provide.
        """
        signature, constants, attributes = specialise(launch)
        attributes = {
            position: attribute
            for position, attribute in attributes.items()
            if _divisible(launch.arguments[launch.kernel.params[position[0]].name])
        }
        options = launch.options()
        key = repr((id(launch.kernel), self.arch, signature, constants, attributes, options))
        if key not in _BINARIES:
            _BINARIES[key] = self._compile(launch, signature, constants, attributes, options)
        return _BINARIES[key]

    def _compile(
        self,
        launch: Any,
        signature: dict[str, str],
        constants: dict[str, Any],
        attributes: dict[tuple[int], Any],
        options: dict[str, Any],
    ) -> Binary:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        source = ASTSource(launch.kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", self.arch, 32), options=options)
        metadata = compiled.metadata
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise ValueError(f"{launch.name}: a kernel with scratch memory is not supported")
        names = tuple(name for name, kind in signature.items() if kind != "constexpr")
        return Binary(
            compiled.asm["ptx"], names, metadata.num_warps, metadata.shared, compiled.asm["cubin"]
        )


# The compiled launches of this process, by everything on which their code depends.
_BINARIES: dict[str, Binary] = {}


def _divisible(value: Any) -> bool:
    """Return whether a tensor's address is divisible by 16; True for any other argument."""
    return value.data_ptr() % 16 == 0 if isinstance(value, Tensor) else True


@contextmanager
def serving_triton(arch: int, run: Callable[[Any, Tensor], None]) -> Iterator[None]:
    """Let a function run every Triton launch inside the block, as `Emulator.run` does.

    Inside the block, the backend "triton" serves CPU tensors with the block sizes of the
    architecture.

    Args:
        arch: Architecture of the GPU, such as 90 for sm_90.
        run: Function of a launch and of a tensor on the device of the launch.

    Raises:
        RuntimeError: If the kernels are loaded for Triton's interpreter.
    """
    with backends.standing_in(STAND_IN, "triton"):
        from fastbert.kernels import tiles
        from fastbert.kernels.launch import Launch

        with (
            mock.patch.object(tiles, "compiled_target", arch),
            mock.patch.object(Launch, "run", lambda launch, on: run(launch, on)),
        ):
            yield


@contextmanager
def emulated(arch: int, **options: Any) -> Iterator[Emulator]:
    """Run every Triton launch inside the block on the PTX machine.

    Args:
        arch: Architecture of the GPU, such as 90 for sm_90.
        options: Keyword arguments of `Module.launch`.

    Yields:
        The emulator, which collects the reports.

    Raises:
        RuntimeError: If the kernels are loaded for Triton's interpreter.
    """
    emulator = Emulator(arch, **options)
    with serving_triton(arch, emulator.run):
        yield emulator


__all__ = ["Binary", "Emulator", "emulated", "serving_triton"]
