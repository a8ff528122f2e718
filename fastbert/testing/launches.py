"""What a piece of the model launches: our kernels, library GEMMs, and anything else.

Each Triton launch and each operator of torch is a kernel on a GPU, unless the operator only makes a
view or allocates. The count is the same in Triton's interpreter, so a machine without a GPU can
hold the promise that nothing foreign runs inside the layers.
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
# A view by another name: its schema does not say so.
VIEWS = {"_reshape_alias", "_unsafe_view", "lift_fresh"}


@dataclass
class Launches:
    """Name → how often it was launched; ``kernels`` are Triton's and the extension's. ``foreign``:
    operators of torch that are no GEMM, no view and no allocation."""

    kernels: Counter[str] = field(default_factory=Counter)
    gemms: Counter[str] = field(default_factory=Counter)
    foreign: Counter[str] = field(default_factory=Counter)

    def total(self) -> int:
        return sum(count.total() for count in (self.kernels, self.gemms, self.foreign))

    def __sub__(self, other: Launches) -> Launches:
        return Launches(
            self.kernels - other.kernels, self.gemms - other.gemms, self.foreign - other.foreign
        )


class _Counting(TorchDispatchMode):
    """Files each operator under ``launches``, and looks into the operators of fastbert."""

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
            # Called past the dispatcher, which would lead back here, with this mode on again.
            with self:
                return IMPLEMENTATIONS[func._opname](*args)
        with self:
            # Composites, matmul for one, are counted as what they are made of.
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
    """Counts what runs inside the block, backward passes too."""
    launches = Launches()
    mode = _Counting(launches)
    with _triton_counted(mode), mode:
        yield launches


@contextmanager
def _triton_counted(mode: _Counting) -> Iterator[None]:
    try:
        from fastbert.kernels.launch import Launch
    except ImportError:  # no Triton: nothing to count
        yield
        return
    run = Launch.run

    def count(launch: Launch, on: torch.Tensor) -> None:
        if min(launch.grid) > 0:
            mode.launches.kernels[launch.name] += 1
        # The interpreter copies with operators of torch.
        mode.paused, before = True, mode.paused
        try:
            run(launch, on)
        finally:
            mode.paused = before

    with mock.patch.object(Launch, "run", count):
        yield


def forward_and_backward(function: Callable[[], torch.Tensor]) -> tuple[Launches, Launches]:
    """What ``function`` launches, and what the backward pass from its result does."""
    with counted() as forward:
        out = function()
    dout = torch.ones_like(out)
    with counted() as backward:
        torch.autograd.backward(out, dout)
    return forward, backward
