"""Cross entropy of a vocabulary projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Compute the cross entropy of ``hidden Wᵀ + b``; see ``fastbert.ops.linear_cross_entropy``.

    If every label is `ignore_index`, the mean is 0, not NaN.
    """
    rows = (labels != ignore_index).nonzero().flatten()
    logits = F.linear(hidden[rows], weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits, labels[rows].long(), reduction="none")
    if reduction == "none":
        return losses.new_zeros(labels.shape).index_copy(0, rows, losses)
    return losses.sum() if reduction == "sum" else losses.sum() / max(rows.numel(), 1)
