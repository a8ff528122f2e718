"""SPLADE's weights of a vocabulary: the maximum over the tokens of each sequence."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def splade(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, cu_seqlens: Tensor
) -> Tensor:
    """Compute the maximum of ``log(1 + relu(hidden Wᵀ + b))``; see ``fastbert.ops.splade``.

    The function is increasing, so it is applied once, to the largest logit of each sequence.
    """
    # Under autocast, the dtype of the logits is not that of `hidden`.
    nothing = F.linear(hidden[:0], weight, bias)
    highest = [
        F.linear(hidden[begin:end], weight, bias).max(dim=0).values
        if begin < end
        else nothing.new_zeros(weight.shape[0])
        for begin, end in pairwise(cu_seqlens.tolist())
    ]
    logits = torch.stack(highest) if highest else nothing
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.relu().log1p().to(logits.dtype)
