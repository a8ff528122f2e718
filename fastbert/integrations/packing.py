"""Find the sequences that a caller of transformers has packed into the rows of a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def restarts(position_ids: Tensor, batch: int, length: int) -> tuple[Tensor | None, Tensor | None]:
    """Find the sequences that are packed into the rows of a batch, from their positions.

    A row is packed if each position is either one more than the position before it or equal to the
    first position of the row. At least one position must return to the first position from a
    different position. Any other gap, repetition or step backwards means that the row is not
    packed.

    Args:
        position_ids: Integer positions of shape ``(B, L)`` or ``(1, L)``.
        batch: Number of rows, B.
        length: Length of the rows, L.

    Returns:
        An attention mask and ``cu_seqlens``; at most one of the two is not None. In a traced graph,
        the first is a bool mask of shape ``(B, 1, L, L)``, or ``(1, 1, L, L)`` if all rows share
        their positions, because the graph must not depend on where sequences begin. Otherwise the
        second is int32 of shape ``(N + 1,)`` with the cumulative lengths of the N sequences.
        Outside a traced graph, both are None if every row is a single sequence. Both are also None
        if `position_ids` does not have two dimensions and the length `length`, or if `length` is
        less than 2.

    Examples:
        >>> import torch
        >>> from fastbert.integrations.packing import restarts
        >>> restarts(torch.tensor([[0, 1, 2, 0, 1]]), batch=1, length=5)
        (None, tensor([0, 3, 5], dtype=torch.int32))
        >>> restarts(torch.tensor([[0, 1, 2, 5, 6]]), batch=1, length=5)
        (None, None)
    """
    if position_ids.dim() != 2 or position_ids.shape[-1] != length or length < 2:
        return None, None
    before, after = position_ids[:, :-1], position_ids[:, 1:]
    first = position_ids[:, :1]
    returns = after == first
    counts = (returns | (after == before + 1)).all(-1) & (returns & (before != first)).any(-1)
    starts = returns & counts.unsqueeze(-1)
    if torch.compiler.is_compiling():
        sequence = F.pad(starts, (1, 0)).cumsum(-1)
        return sequence[:, None, :, None] == sequence[:, None, None, :], None
    if not bool(starts.any()):
        return None, None
    starts = F.pad(starts, (1, 0), value=True).expand(batch, length).flatten()
    places = starts.nonzero().flatten().int()
    return None, F.pad(places, (0, 1), value=batch * length)
