"""Compile the Triton launches of fastbert to PTX and run them on the PTX machine."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from fastbert.testing.ahead_of_time import specialise
from fastbert.testing.ptx.machine import Module, Report, load


@functools.cache
def _loaded(text: str) -> Module:
    return load(text)


class Emulator:
    """Runs launches on the PTX machine, for one architecture.

    Args:
        arch: Architecture of the GPU, as 90 for sm_90.
        options: Keyword arguments of `Module.launch`, as ``seed`` or ``races``.

    Attributes:
        reports: Name and report of each launch so far.
    """

    def __init__(self, arch: int, **options: Any) -> None:
        """Keep the options of the launches."""
        self.arch = arch
        self.options = options
        self.reports: list[tuple[str, Report]] = []

    def run(self, launch: Any, on: Tensor | None = None) -> None:
        """Compile a launch and run it on its own tensors; an empty grid runs nothing.

        Raises:
            RuntimeError: If lanes of one instruction store different values to one address. A
                layout may hold an element in several lanes, which must then agree on its value.
        """
        if min(launch.grid) == 0:
            return
        kernel, arguments, warps, shared = self._compiled(launch)
        module = _loaded(kernel)
        [name] = module.kernels
        report = module.launch(
            name, launch.grid, (32 * warps, 1, 1), arguments, dynamic_shared=shared, **self.options
        )
        self.reports.append((launch.name, report))
        if conflicts := report.counts["conflicting_stores"]:
            raise RuntimeError(
                f"{launch.name}: {conflicts} stores of two values to one address in one instruction"
            )

    def _compiled(self, launch: Any) -> tuple[str, list[Any], int, int]:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature, constants, attributes = specialise(launch)
        attributes = {
            position: attribute
            for position, attribute in attributes.items()
            if _divisible(launch.arguments[launch.kernel.params[position[0]].name])
        }
        source = ASTSource(launch.kernel, signature, constants, attributes)
        target = GPUTarget("cuda", self.arch, 32)
        compiled = triton.compile(source, target=target, options=launch.options())
        arguments = [
            launch.arguments[name] for name, kind in signature.items() if kind != "constexpr"
        ]
        # The scratch memories that Triton appends to the parameters; our kernels have none.
        if compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size:
            raise ValueError(f"{launch.name}: a kernel with scratch memory is not supported")
        return (
            compiled.asm["ptx"], [*arguments, None, None], compiled.metadata.num_warps,
            compiled.metadata.shared,
        )  # fmt: skip


def _divisible(value: Any) -> bool:
    """Whether an argument is divisible by 16, as Triton's launcher would find."""
    return value.data_ptr() % 16 == 0 if isinstance(value, Tensor) else True


@contextmanager
def emulated(arch: int, **options: Any) -> Iterator[Emulator]:
    """Run every Triton launch inside the block on the PTX machine.

    Args:
        arch: Architecture of the GPU, as 90 for sm_90.
        options: Keyword arguments of `Module.launch`.

    Yields:
        The emulator, which keeps the reports.
    """
    from fastbert.kernels.launch import Launch

    emulator = Emulator(arch, **options)
    with mock.patch.object(Launch, "run", lambda launch, on: emulator.run(launch, on)):
        yield emulator


__all__ = ["Emulator", "emulated"]
