"""One shape in one dtype and direction, and the engines that are timed at it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fastbert.bench.attention_peers import Prepared
from fastbert.bench.limits import Goal, Work
from fastbert.testing.cases import Case, Inputs

TRAINING = "training"


@dataclass(frozen=True)
class Contender:
    """An engine: how it is prepared, whether it is ours, and whether it computes the same function.

    What computes another function (a tanh GELU, a product without its GELU) is shown and never
    counted as the best peer.
    """

    name: str
    prepare: Callable[[Inputs], Prepared]
    ours: bool = False
    same_function: bool = True


@dataclass(frozen=True)
class Match:
    """One shape in one dtype and direction. ``series`` and ``label`` place it in the plot.

    case: where the inputs come from, and the reference that judges; None leaves both to
    ``batches``, inputs that stand for a batch by its seed, and the judging to ``prepare``. amount:
    what one call does in ``unit``, so that the rate is amount / seconds. ratio_goal: the best
    peer's time over ours to reach. graphs: time a CUDA graph's replays, the host's part apart.
    memory: also measure the peak of one forward and backward pass.
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
