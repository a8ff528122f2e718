"""Input tensors in the shape of a bucket; graphs can read them, as their addresses never change.

If a mask is on the GPU, the CPU would have to wait for the mask before it could remove the padding.
`StaticPadded` therefore removes the padding in a recorded function. The function orders all
positions of the padded batch, first the tokens and then the padding. The GEMMs therefore compute
the rows of the padding as well, but the CPU never waits.
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

        The rows after the batch keep the ids of an earlier batch, or 0. All of these ids are valid.
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
            mask: Mask of shape ``(B, L)``; a position has a token where the mask is not 0.
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
        """Remove the padding without a read from the device; graphs record this method.

        Returns:
            All positions of the padded batch as rows: first the tokens, then the padding, which
            belongs to no sequence. Also, for each position of the padded batch, the index of its
            row, int64 of shape ``(B · L,)``.
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
    """Return the cumulative lengths of `layout`; compute them if all sequences have one length."""
    if layout.cu_seqlens is not None:
        return layout.cu_seqlens
    last = layout.batch * layout.length
    return torch.arange(0, last + 1, layout.length, dtype=torch.int32, device=device)


def is_far(mask: Tensor) -> bool:
    """Return whether `mask` is not on the CPU, so that the CPU would have to wait to read it."""
    return mask.device.type != "cpu"


def far_bucket(buckets: Buckets, ids: Tensor | None, mask: Tensor | None) -> PaddedBucket | None:
    """Return the bucket of a padded batch whose mask the CPU should not read.

    Args:
        buckets: The limits of the batches that have a bucket.
        ids: Token ids of the padded batch, or None.
        mask: Mask of the padded batch, or None.

    Returns:
        The bucket; or None if `ids` or `mask` is None, if the mask is on the CPU or is not a matrix
        of the shape of `ids`, or if the batch has no padded bucket.
    """
    if ids is None or mask is None or not is_far(mask):
        return None
    if mask.dim() != 2 or mask.shape != ids.shape:
        return None
    return buckets.find_padded(*mask.shape)


def moved(
    tokens: EncoderInput, device: torch.device, *, non_blocking: bool = False
) -> EncoderInput:
    """Move the tokens of a batch to `device`.

    The tokens are on the CPU if their padding was removed there.

    Args:
        tokens: The tokens, with ids.
        device: The device.
        non_blocking: Whether the call may return before tensors in pinned memory are copied.

    Returns:
        The tokens on `device`, or `tokens` itself if they are on `device` already.
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
