"""Conversion of batches between padded and packed layout."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Packed(NamedTuple):
    """A batch of sequences without padding, and the rows of its tokens in the padded batch.

    Args:
        values: Rows of shape ``(T, ...)``, with the sequences one after another.
        indices: Row of each token in the flattened padded batch, int64 of shape ``(T,)``.
        cu_seqlens: Cumulative lengths, int32 of shape ``(B + 1,)``, as in
            ``flash_attn_varlen_func``.
        max_seqlen: Length of the longest sequence.
        batch: Number of sequences, B.
        length: Number of positions of each sequence in the padded batch, L.
    """

    values: Tensor
    indices: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    batch: int
    length: int


def longest(cu_seqlens: Tensor) -> int:
    """Return the length of the longest sequence; on a GPU, this synchronises with the device."""
    lengths = cu_seqlens.diff()
    return int(lengths.max()) if lengths.numel() else 0


def unpad(x: Tensor, mask: Tensor) -> Packed:
    """Remove the padding of x (B, L, ...); see ``fastbert.ops.unpad``."""
    keep = mask.bool()
    lengths = keep.sum(dim=1, dtype=torch.int32)
    indices = keep.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    values = x.flatten(0, 1).index_select(0, indices)
    return Packed(values, indices, cu_seqlens, longest(cu_seqlens), mask.shape[0], mask.shape[1])


def pad(packed: Packed) -> Tensor:
    """Return the padded batch (B, L, ...) of `packed`, with 0 at the positions of the padding."""
    rows = packed.batch * packed.length
    flat = packed.values.new_zeros(rows, *packed.values.shape[1:])
    flat = flat.index_copy(0, packed.indices, packed.values)
    return flat.view(packed.batch, packed.length, *packed.values.shape[1:])


def sequence_positions(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the index of each packed row's sequence, and the row's position in the sequence.

    Both are int64 (rows,). Rows from ``cu_seqlens[-1]`` on get the index B, which no sequence has,
    and the position 0.
    """
    row = torch.arange(rows, device=cu_seqlens.device)
    boundaries = cu_seqlens.long()
    sequence = torch.searchsorted(boundaries[1:].contiguous(), row, right=True)
    position = row - boundaries.index_select(0, sequence)
    return sequence, position.masked_fill(sequence == cu_seqlens.shape[0] - 1, 0)


def pad_rows(x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad packed rows (T, ...) to (B, L, ...), where L is `max_seqlen`.

    Rows from ``cu_seqlens[-1]`` on belong to no sequence and are left out.

    Returns:
        The padded rows; the slot of each packed row, int64 (T,); and whether the row belongs to a
        sequence, bool (T,). The slot is the row's index in the flattened padded batch (B·L, ...).
    """
    batch = cu_seqlens.numel() - 1
    sequence, position = sequence_positions(cu_seqlens, x.shape[0])
    used = sequence < batch
    # Rows without a sequence are written to a spare slot after the batch, which is cut off.
    slot = sequence * max_seqlen + position
    padded = x.new_zeros(batch * max_seqlen + 1, *x.shape[1:]).index_copy(0, slot, x)[:-1]
    return padded.view(batch, max_seqlen, *x.shape[1:]), slot, used


def unpad_rows(padded: Tensor, slot: Tensor, used: Tensor) -> Tensor:
    """Invert `pad_rows`, from (B, L, ...) to (T, ...); rows that belong to no sequence are 0."""
    flat = torch.cat([padded.flatten(0, 1), padded.new_zeros(1, *padded.shape[2:])])
    return flat.index_select(0, torch.where(used, slot, flat.shape[0] - 1))


def existing_queries(lengths: Tensor, max_seqlen: int) -> Tensor:
    """Return which query rows of (B, H, Lq, Lk) belong to a token, as bool (B, 1, Lq, 1).

    `lengths` has the number of queries of each sequence, and `max_seqlen` is Lq.
    """
    query = torch.arange(max_seqlen, device=lengths.device)
    return (query < lengths[:, None])[:, None, :, None]
