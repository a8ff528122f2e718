"""The optimizers, with groups for weight decay and a schedule of the learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastbert.training.lamb import Lamb
from fastbert.training.schedules import make_schedule

OPTIMIZERS = ("adamw", "lamb")
BETAS, EPSILON = (0.9, 0.999), 1e-6


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


def make_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    warmup: float,
    total_steps: int,
    kind: str = "adamw",
    schedule: str = "linear",
    graphed_on: torch.device | None = None,
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Build an optimizer and its schedule; the default kinds are those of Devlin et al. 2019.

    Args:
        model: The model.
        learning_rate: Peak of the learning rate.
        weight_decay: Weight decay of matrices and embedding tables.
        warmup: Fraction of the steps in which the learning rate rises.
        total_steps: Number of steps.
        kind: ``"adamw"`` (Loshchilov and Hutter 2019), fused; or ``"lamb"`` (You et al. 2020),
            which scales only the updates of matrices and embedding tables.
        schedule: Shape of the schedule; see `schedule_factor`.
        graphed_on: Device of CUDA graphs that contain the step of AdamW; None without graphs.

    Returns:
        The optimizer and the schedule of its learning rate.
    """
    graphed = graphed_on is not None
    groups = decay_groups(model, weight_decay)
    # The schedule multiplies ``initial_lr``, which is a Python number because reading the rate from
    # a tensor would wait for the GPU.
    groups = [{**group, "initial_lr": learning_rate} for group in groups]
    optimizer: torch.optim.Optimizer
    if kind == "lamb":
        matrices, vectors = groups
        groups = [{**matrices, "adapt": True}, {**vectors, "adapt": False}]
        optimizer = Lamb(groups, lr=learning_rate, betas=BETAS, eps=EPSILON)
    else:
        optimizer = torch.optim.AdamW(
            groups,
            lr=torch.tensor(learning_rate, device=graphed_on) if graphed else learning_rate,
            betas=BETAS,
            eps=EPSILON,
            fused=True,
            capturable=graphed,
        )
    shape = make_schedule(optimizer, shape=schedule, warmup=warmup, total_steps=total_steps)
    return optimizer, shape
