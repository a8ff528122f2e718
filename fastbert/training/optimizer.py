"""AdamW with decay groups, and the learning rate's warm-up and linear decay."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices and tables decay; biases and LayerNorm parameters do not.

    Those that do not decay are exactly the vectors of a BERT (Devlin et al. 2019, appendix A.2; the
    exclusion list of their optimizer). A tied parameter appears once.
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def schedule_factor(step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Fraction of the peak learning rate at ``step`` (from 0): linear up, then linear down to zero.

    The first step already learns (1 / warmup_steps) and so does the last (1 / decay steps): no step
    is spent at a rate of zero.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))


def make_optimizer(
    model: nn.Module, *, learning_rate: float, weight_decay: float, warmup: float, total_steps: int
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW (Loshchilov and Hutter 2019) and its schedule; betas, eps as in Devlin et al. 2019."""
    optimizer = torch.optim.AdamW(
        decay_groups(model, weight_decay),
        lr=learning_rate,
        betas=(0.9, 0.999),
        eps=1e-6,
        fused=True,
    )
    factor = partial(
        schedule_factor, warmup_steps=round(warmup * total_steps), total_steps=total_steps
    )
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
