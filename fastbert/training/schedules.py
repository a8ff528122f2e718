"""Schedules of the learning rate: a linear warm-up, and then one of several shapes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

SCHEDULES = ("linear", "cosine", "constant")


def schedule_factor(
    step: int, *, warmup_steps: int, total_steps: int, shape: str = "linear"
) -> float:
    """Return the learning rate at `step` (from 0) as a fraction of its peak.

    The rate rises linearly for `warmup_steps` steps. No step has a rate of zero: the first step has
    ``1 / warmup_steps``, and the last step of a linear decay has ``1 / (total_steps -
    warmup_steps)``.

    Args:
        step: Index of the step, from 0.
        warmup_steps: Number of steps in which the rate rises.
        total_steps: Number of steps.
        shape: The shape after the warm-up. ``"linear"`` falls to zero. ``"cosine"`` falls to zero
            along half a period of a cosine (Loshchilov and Hutter 2017, equation 5, without
            restarts). ``"constant"`` stays at the peak.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if shape == "constant":
        return 1.0
    decaying = max(1, total_steps - warmup_steps)
    left = max(0.0, (total_steps - step) / decaying)
    return left if shape == "linear" else (1 - math.cos(math.pi * left)) / 2


def make_schedule(
    optimizer: torch.optim.Optimizer, *, shape: str, warmup: float, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Build the schedule of an optimizer's learning rate.

    Args:
        optimizer: The optimizer, whose learning rate is the peak.
        shape: ``"linear"``, ``"cosine"`` or ``"constant"``; see `schedule_factor`.
        warmup: Fraction of the steps in which the learning rate rises.
        total_steps: Number of steps.
    """
    factor = partial(
        schedule_factor,
        warmup_steps=round(warmup * total_steps),
        total_steps=total_steps,
        shape=shape,
    )
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def continue_schedule(schedule: torch.optim.lr_scheduler.LambdaLR, step: int) -> None:
    """Give a new schedule and its optimizer the learning rate after `step` steps.

    Args:
        schedule: The schedule of `make_schedule`.
        step: Number of steps that were made, at least 1.
    """
    state: dict[str, Any] = schedule.state_dict()
    # `_step_count` only determines whether torch warns about a first call that is too early.
    schedule.load_state_dict({**state, "last_epoch": step - 1, "_step_count": step + 1})
    schedule.step()
