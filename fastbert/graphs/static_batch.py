"""The memory of a bucket, which keeps its address, so that a recorded function can read it.

A mask on the GPU would have to be read before its padding could be removed, and the CPU would wait.
`StaticPadded` therefore removes the padding in a recorded function. Its rows are all places of the
padded batch: the tokens first, then the padding. So the GEMMs compute the padding too, but the CPU
never waits.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fastbert.graphs.buckets import Bucket, Buckets, PaddedBucket
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.inputs import EncoderInput
from fastbert.ops.varlen import tokens_first


class StaticBatch:
    """The memory that a recorded function reads: a packed batch in the shape of its bucket.

    Args:
        bucket: The shape of the batch.
        device: The device of the memory.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        """Allocate the memory, which holds a batch without tokens."""
        self.ids, self.token_types, self.positions = (
            torch.zeros(bucket.tokens, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.cu_seqlens = torch.zeros(bucket.batch + 1, dtype=torch.int32, device=device)
        layout = BatchLayout(bucket.batch, bucket.max_seqlen, self.cu_seqlens, bucket.max_seqlen)
        self.input = EncoderInput(self.ids, None, self.token_types, self.positions, layout)

    def fill(self, tokens: EncoderInput) -> None:
        """Copy a batch into the memory.

        The rows after the batch keep the ids of an earlier batch, or 0; all of them are valid ids.
        """
        assert tokens.ids is not None
        rows, batch = tokens.ids.shape[0], tokens.layout.batch
        self.ids[:rows].copy_(tokens.ids)
        if tokens.token_types is not None:
            self.token_types[:rows].copy_(tokens.token_types)
        self.positions[:rows].copy_(tokens.positions)
        ends = _ends(tokens.layout, tokens.ids.device)
        self.cu_seqlens[: batch + 1].copy_(ends)
        # The remaining sequences have no token.
        self.cu_seqlens[batch + 1 :].copy_(ends[-1:].expand(self.cu_seqlens.shape[0] - batch - 1))


class StaticPadded:
    """The memory that a recorded function reads: a padded batch in the shape of its bucket.

    Args:
        bucket: The shape of the batch.
        device: The device of the memory.
    """

    def __init__(self, bucket: PaddedBucket, device: torch.device) -> None:
        """Allocate the memory, which holds a batch without tokens."""
        self.bucket = bucket
        self.ids, self.token_types, self.positions = (
            torch.zeros(bucket, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.exists = torch.zeros(bucket, dtype=torch.bool, device=device)

    def fill(self, tokens: EncoderInput, mask: Tensor) -> None:
        """Copy a batch into the memory.

        Args:
            tokens: The batch in a uniform layout, padding included.
            mask: Mask of shape ``(B, L)``; a token exists where it is not 0.
        """
        assert tokens.ids is not None
        shape = mask.shape
        corner = (slice(shape[0]), slice(shape[1]))
        self.ids[corner].copy_(tokens.ids.view(shape))
        if tokens.token_types is not None:
            self.token_types[corner].copy_(tokens.token_types.view(shape))
        self.positions[corner].copy_(tokens.positions.view(shape))
        self.exists.zero_()
        self.exists[corner].copy_(mask)

    def unpadded(self) -> tuple[EncoderInput, Tensor]:
        """Remove the padding without a read from the device; this is recorded.

        Returns:
            The rows, first the rows of the tokens, then the rows of the padding, which belong to no
            sequence; and the row of each place in the padded batch, int64 of shape ``(B · L,)``.
        """
        indices, rows, cu_seqlens = tokens_first(self.exists)
        batch, length = self.bucket
        layout = BatchLayout(batch, length, cu_seqlens, length, indices)
        ids, types, positions = (
            x.flatten().index_select(0, indices)
            for x in (self.ids, self.token_types, self.positions)
        )
        return EncoderInput(ids, None, types, positions, layout), rows


def _ends(layout: BatchLayout, device: torch.device) -> Tensor:
    """Return the ``cu_seqlens`` of any layout."""
    if layout.cu_seqlens is not None:
        return layout.cu_seqlens
    last = layout.batch * layout.length
    return torch.arange(0, last + 1, layout.length, dtype=torch.int32, device=device)


def is_far(mask: Tensor) -> bool:
    """Tell whether a read of `mask` lets the CPU wait for a GPU."""
    return mask.device.type != "cpu"


def far_bucket(buckets: Buckets, ids: Tensor | None, mask: Tensor | None) -> PaddedBucket | None:
    """Return the bucket of a padded batch whose mask the CPU should not read.

    Args:
        buckets: The limits of a batch with a bucket.
        ids: Token ids; None if the caller gave none.
        mask: Mask of the padded batch; None if there is none.

    Returns:
        The bucket; or None if the CPU may read the mask, or if the batch has no padded bucket.
    """
    if ids is None or mask is None or not is_far(mask):
        return None
    if mask.dim() != 2 or mask.shape != ids.shape:
        return None
    return buckets.find_padded(*mask.shape)


def moved(
    tokens: EncoderInput, device: torch.device, *, non_blocking: bool = False
) -> EncoderInput:
    """Move `tokens` to `device`, because the padding may have been removed on the CPU.

    Args:
        tokens: The tokens.
        device: The device.
        non_blocking: Whether the CPU goes on before memory that is pinned has been read.

    Returns:
        The tokens on `device`; `tokens` itself if they are there.
    """
    if tokens.positions.device == device:
        return tokens

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=non_blocking)

    layout = tokens.layout
    tensors = {
        name: there(getattr(layout, name))
        for name in ("cu_seqlens", "indices", "mask", "bias")
        if getattr(layout, name) is not None
    }
    assert tokens.ids is not None
    types = None if tokens.token_types is None else there(tokens.token_types)
    rows = (there(tokens.ids), None, types, there(tokens.positions))
    return EncoderInput(*rows, dataclasses.replace(layout, **tensors))
