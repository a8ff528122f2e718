"""A match: one shape in one dtype and direction, with the implementations that are timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastbert.bench.attention_peers import Prepared
from fastbert.bench.limits import Goal, Work, work
from fastbert.ops.backend import dtype_name
from fastbert.testing.cases import Case, Inputs


@dataclass(frozen=True)
class Contender:
    """An implementation to time; `prepare` makes its calls ready for given inputs.

    `ours` says whether the implementation is fastbert's, and `same_function` whether it computes
    the function of the match. A contender with another function, such as a product without its
    GELU, is shown but never counts as the best peer.
    """

    name: str
    prepare: Callable[[Inputs], Prepared]
    ours: bool = False
    same_function: bool = True


@dataclass(frozen=True)
class Match:
    """A comparison of implementations on one shape, in one dtype, forward or backward.

    Attributes:
        series, label: Panel of the plot, and label of the match in the panel.
        amount: Work of one call; the rate is amount / seconds, in ``unit``.
        case: Case that draws the inputs and has a reference. If None, ``prepare`` of a contender
            checks the result.
        batches: The inputs if there is no case; each has the seed of a batch.
        ratio_goal: Goal for the best peer's time over the time of fastbert.
        graphs: Whether replays of a CUDA graph are timed.
        memory: Whether the peak memory of a forward and backward pass is measured, too.
    """

    series: str
    label: str
    op: str
    dtype: torch.dtype
    direction: str
    contenders: Sequence[Contender]
    work: Work
    unit: str
    amount: float
    case: Case | None = None
    batches: Sequence[Inputs] = ()
    goal: Goal | None = None
    ratio_goal: float | None = None
    graphs: bool = True
    memory: bool = False


def of_case(
    case: Case,
    dtype: torch.dtype,
    direction: str,
    contenders: Sequence[Contender],
    unit: str,
    *,
    series: str | None = None,
    label: str | None = None,
    **options: Any,
) -> Match:
    """Return the match of ``case``; ``unit`` is "TFLOP/s" or "GB/s"."""
    least = work(case, dtype, direction)
    return Match(
        series=series or f"{case.op} {direction}",
        label=f"{label or case.name} {dtype_name(dtype)}",
        op=case.op,
        dtype=dtype,
        direction=direction,
        contenders=contenders,
        work=least,
        unit=unit,
        amount=least.bytes / 1e9 if unit == "GB/s" else least.flops / 1e12,
        case=case,
        **options,
    )
