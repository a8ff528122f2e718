"""A kernel launch as data, and the arguments of dropout."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Dropout(NamedTuple):
    """Kernel arguments of one dropout probability.

    Args:
        threshold: A 24-bit draw below this number drops its element.
        scale: Factor of the elements that are kept.
        enabled: Whether the probability is above 0.
    """

    threshold: int
    scale: float
    enabled: bool


def dropout_arguments(p: float, seed: Tensor | None) -> Dropout:
    """Return the kernel arguments of a dropout probability.

    Args:
        p: Probability in [0, 1] with which an element is dropped.
        seed: Seed, int64 (1,); required if p > 0.

    Raises:
        ValueError: If p is not allowed, or if p > 0 and there is no seed.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout_p: got {p}, allowed: 0 to 1")
    if p > 0.0 and seed is None:
        raise ValueError(
            f"seed: got None with dropout_p={p}, allowed: an int64 tensor of shape (1,)"
        )
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return Dropout(threshold=int(p * 2**24 + 0.5), scale=scale, enabled=p > 0.0)


def device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make x's device current; Triton launches on the current device, not on its arguments'."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


class Launch(NamedTuple):
    """One complete kernel launch, which can run now or be compiled ahead of time.

    Args:
        name: Name of the launch.
        kernel: The kernel.
        grid: Numbers of programs.
        arguments: Arguments of the kernel by name.
        num_warps: Warps of a program.
        num_stages: Stages of the pipelines of its loops.
        fp_fusion: Whether the compiler may contract ``a * b + c`` to one operation with one
            rounding. A contracted ``a * b - c`` is not 0 where c is the rounded product.
    """

    name: str
    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int
    fp_fusion: bool = True

    def options(self) -> dict[str, Any]:
        """Return the options with which Triton compiles the kernel."""
        # The last option is always given, because the default of Triton 3.10 changes.
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.fp_fusion,
        }

    def run(self, on: Tensor) -> None:
        """Run the kernel on the device of `on`; an empty grid runs nothing."""
        if min(self.grid) == 0:
            return
        with device_of(on):
            self.kernel[self.grid](**self.arguments, **self.options())
