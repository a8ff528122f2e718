"""Find the sequences that a caller of transformers has packed into the rows of a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def restarts(position_ids: Tensor, batch: int, length: int) -> tuple[Tensor | None, Tensor | None]:
    """Find the sequences that are packed into the rows of a batch, from their positions.

    Args:
        position_ids: Integer positions of shape ``(B, L)`` or ``(1, L)``. A sequence begins
            wherever a position is not one more than the position before it.
        batch: Number of rows, B.
        length: Length of the rows, L.

    Returns:
        A mask of pairs and ``cu_seqlens``; at most one of the two is not None. The mask is bool of
        shape ``(B, 1, L, L)``, or ``(1, 1, L, L)`` for shared positions. It is given in a traced
        graph, because such a graph must not depend on where sequences begin. ``cu_seqlens`` is
        int32 of shape ``(N + 1,)`` and is given otherwise. Outside a traced graph, both are None if
        every row is a single sequence. Both are also None if `position_ids` does not have the
        length `length`.

    Examples:
        >>> import torch
        >>> from fastbert.integrations.packing import restarts
        >>> restarts(torch.tensor([[0, 1, 2, 0, 1]]), batch=1, length=5)
        (None, tensor([0, 3, 5], dtype=torch.int32))
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
