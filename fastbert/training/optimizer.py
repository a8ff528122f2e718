"""AdamW with groups for weight decay, and a learning rate with warm-up and linear decay."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Group the parameters of a model by weight decay.

    Matrices and embedding tables decay. Vectors do not decay; in a BERT, these are the biases and
    the parameters of LayerNorm, as in the optimizer of Devlin et al. 2019 (appendix A.2). A tied
    parameter appears once.
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def schedule_factor(step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Return the learning rate at `step` (from 0) as a fraction of its peak.

    The rate rises linearly for `warmup_steps` steps and then falls linearly. No step has a rate of
    zero: the first step has ``1 / warmup_steps``, and the last step has ``1 / (total_steps -
    warmup_steps)``.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))


def make_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    warmup: float,
    total_steps: int,
    graphed_on: torch.device | None = None,
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """Build AdamW (Loshchilov and Hutter 2019) and its schedule, as in Devlin et al. 2019.

    Args:
        model: The model.
        learning_rate: Peak of the learning rate.
        weight_decay: Weight decay of matrices and embedding tables.
        warmup: Fraction of the steps in which the learning rate rises.
        total_steps: Number of steps.
        graphed_on: Device of CUDA graphs that contain the optimizer's step; None without graphs.

    Returns:
        The optimizer and the schedule of its learning rate.
    """
    graphed = graphed_on is not None
    groups = decay_groups(model, weight_decay)
    # The schedule multiplies this number. The read of a rate that is a tensor would wait for a GPU.
    groups = [{**group, "initial_lr": learning_rate} for group in groups]
    optimizer = torch.optim.AdamW(
        groups,
        lr=torch.tensor(learning_rate, device=graphed_on) if graphed else learning_rate,
        betas=(0.9, 0.999),
        eps=1e-6,
        fused=True,
        capturable=graphed,
    )
    factor = partial(
        schedule_factor, warmup_steps=round(warmup * total_steps), total_steps=total_steps
    )
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def continue_schedule(schedule: torch.optim.lr_scheduler.LambdaLR, step: int) -> None:
    """Give a new schedule, and its optimizer, the learning rate after a number of steps.

    Args:
        schedule: The schedule of `make_optimizer`.
        step: Number of steps that were made, at least 1.
    """
    state = schedule.state_dict()
    # The count of calls only decides about a warning for a first call that is too early.
    schedule.load_state_dict({**state, "last_epoch": step - 1, "_step_count": step + 1})
    schedule.step()
