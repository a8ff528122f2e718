"""Count the launches of a part of the model: kernels of fastbert, library GEMMs, and others.

Each Triton launch and each operator of torch is a kernel on a GPU, unless the operator only makes a
view or allocates memory. The counts are the same in Triton's interpreter, so a machine without a
GPU can check that no foreign kernel runs inside the layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastbert.ops.register import IMPLEMENTATIONS

GEMMS = {"addbmm", "addmm", "baddbmm", "bmm", "mm"}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# These operators make views, but their schemas do not state it.
VIEWS = {"_reshape_alias", "_unsafe_view", "lift_fresh"}


@dataclass
class Launches:
    """The numbers of launches by name.

    Args:
        kernels: Launches of Triton kernels, and calls of operators of the C++ extension.
        gemms: Matrix products of torch.
        foreign: Operators of torch that are not a GEMM, a view or an allocation.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    gemms: Counter[str] = field(default_factory=Counter)
    foreign: Counter[str] = field(default_factory=Counter)

    def total(self) -> int:
        """Return the number of all launches."""
        return sum(count.total() for count in (self.kernels, self.gemms, self.foreign))

    def __sub__(self, other: Launches) -> Launches:
        """Subtract the numbers in `other`; a difference that is not above 0 is left out."""
        return Launches(
            self.kernels - other.kernels, self.gemms - other.gemms, self.foreign - other.foreign
        )


class _Counting(TorchDispatchMode):
    """A mode that counts each operator of torch, also inside the operators of fastbert."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.launches = launches
        self.paused = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if func.namespace == "fastbert":
            # The implementation is called directly, because the dispatcher would call this method
            # again. The mode is entered again, so that the operators inside are counted.
            with self:
                return IMPLEMENTATIONS[func._opname](*args)
        with self:
            # A composite operator, such as matmul, is counted as the operators inside it.
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        name = func._opname
        if func.namespace == "fastbert_C":
            self.launches.kernels[name] += 1
        elif name in GEMMS:
            self.launches.gemms[name] += 1
        elif name not in ALLOCATIONS | VIEWS and not _is_view(func):
            self.launches.foreign[f"{func.namespace}.{name}"] += 1
        return func(*args, **kwargs)


def _is_view(func: Any) -> bool:
    returns = [r.alias_info for r in func._schema.returns]
    return bool(returns) and all(alias is not None and not alias.is_write for alias in returns)


@contextmanager
def counted() -> Iterator[Launches]:
    """Count the launches inside the block, including launches of backward passes.

    Yields:
        The counts, which grow while the block runs.

    Examples:
        >>> import torch
        >>> from fastbert.testing.launches import counted
        >>> with counted() as launches:
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 2)
        >>> launches.gemms
        Counter({'mm': 1})
    """
    launches = Launches()
    mode = _Counting(launches)
    with _triton_counted(mode), mode:
        yield launches


@contextmanager
def _triton_counted(mode: _Counting) -> Iterator[None]:
    try:
        from fastbert.kernels.launch import CachedLaunch, Launch
    except ImportError:
        # Without Triton, there is no Triton launch to count.
        yield
        return
    run, run_cached = Launch.run, CachedLaunch.run

    def count(launch: Launch, on: torch.Tensor) -> Any:
        if min(launch.grid) > 0:
            mode.launches.kernels[launch.name] += 1
        # Triton's interpreter copies with operators of torch, which are not counted.
        mode.paused, before = True, mode.paused
        try:
            return run(launch, on)
        finally:
            mode.paused = before

    def count_cached(launch: CachedLaunch, addresses: tuple[int | None, ...]) -> None:
        mode.launches.kernels[launch.name] += 1
        run_cached(launch, addresses)

    with (
        mock.patch.object(Launch, "run", count),
        mock.patch.object(CachedLaunch, "run", count_cached),
    ):
        yield


def forward_and_backward(function: Callable[[], torch.Tensor]) -> tuple[Launches, Launches]:
    """Count the launches of a function and of the backward pass from its result.

    Args:
        function: Function that computes a tensor of any shape, which requires a gradient.

    Returns:
        The launches of the forward pass and of the backward pass.
    """
    with counted() as forward:
        out = function()
    dout = torch.ones_like(out)
    with counted() as backward:
        torch.autograd.backward(out, dout)
    return forward, backward
