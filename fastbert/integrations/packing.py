"""Sequences that a caller of transformers has packed into the rows of a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def restarts(position_ids: Tensor, batch: int, length: int) -> tuple[Tensor | None, Tensor | None]:
    """The sequences packed into rows of a batch, found where the positions do not continue.

    Args:
        position_ids: (B or 1, L) positions; a sequence begins wherever they do not grow by 1.
        batch: B.
        length: L.

    Returns:
        A mask of pairs, bool (B, 1, L, L), and ``cu_seqlens``, int32 (N + 1,). At most one of them
        is set: the mask in a traced graph, which must not depend on where sequences begin,
        ``cu_seqlens`` otherwise. Both are None when every row is one sequence.
    """
    if position_ids.shape[-1] != length:
        return None, None
    starts = position_ids.diff(dim=-1) != 1
    if torch.compiler.is_compiling():
        sequence = F.pad(starts, (1, 0)).cumsum(-1)
        return sequence[:, None, :, None] == sequence[:, None, None, :], None
    if not bool(starts.any()):
        return None, None
    starts = F.pad(starts, (1, 0), value=True).expand(batch, length).flatten()
    first = starts.nonzero().flatten().int()
    return None, F.pad(first, (0, 1), value=batch * length)
