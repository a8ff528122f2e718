"""The division of rows ``(T, H)`` into sequences, with conversions from and to padded batches.

``fastbert.modules.inputs`` makes one layout per call of a model and passes it to every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastbert import ops
from fastbert.modules.positions import Rotation
from fastbert.modules.relative_positions import Relative
from fastbert.ops.varlen import sequence_positions


@dataclass(frozen=True)
class BatchLayout:
    """The division of rows into sequences: a uniform, an unpadded or a packed layout.

    In a uniform layout, `cu_seqlens` is None, and row ``b * length + i`` is token ``i`` of sequence
    ``b``. The rows are a view of the padded batch. In an unpadded layout, `indices` gives the index
    of each row in the flattened padded batch. In a packed layout, the caller passes rows without
    padding, in tensors of shape ``(T, ...)``.

    Attributes:
        batch: Number of sequences.
        length: Length L of the padded batch; in a packed layout, the longest sequence's length.
        cu_seqlens: Cumulative lengths from 0, int32 of shape ``(batch + 1,)``; None if uniform.
        max_seqlen: Length of the longest sequence, or an upper bound of it; 0 if uniform.
        indices: Index of each row in the flattened padded batch, int64 of shape ``(T,)``; None
            unless the layout is unpadded.
        mask: 4-D bool mask, True where a query attends to a key, or None. Only a uniform layout can
            have a mask.
        bias: 4-D floating bias of the attention logits, or None. The bias is the caller's additive
            mask (only in a uniform layout), the encoder's bias by distance, or their sum.
        rotations: Maps the base of a rotary embedding to the cosines and sines that rotate the
            queries and keys of the rows.
        relative: Relative positions in the logits of attention, or None.
        places: Positions of the tokens in the padded batch, int64 of shape ``(batch, max_seqlen)``,
            if a sequence has padding in its middle and attention depends on distances between
            tokens; otherwise None.
        tokens: Mask of the rows that are tokens, bool of shape ``(batch, length)``, if a uniform
            layout has padding; otherwise None.
        shape: Shape ``(R, C)`` of packed rows that the caller holds as ``(R, C, ...)``, with
            ``R * C = T``. None if the caller's shape is ``(T, ...)``.
        whole: Whether the layers call their modules with hidden states of the caller's shape, such
            as ``(B, L, H)``, instead of rows ``(T, H)``.
    """

    batch: int
    length: int
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    indices: Tensor | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    rotations: dict[float, Rotation] = field(default_factory=dict)
    relative: Relative | None = None
    places: Tensor | None = None
    tokens: Tensor | None = None
    shape: tuple[int, int] | None = None
    whole: bool = False

    @property
    def packed(self) -> bool:
        """Whether the layout is packed: the caller passes rows without padding."""
        return self.cu_seqlens is not None and self.indices is None

    @property
    def longest(self) -> int:
        """Length of the longest sequence, or an upper bound of it, in every layout."""
        return self.length if self.cu_seqlens is None else self.max_seqlen

    def ends(self, device: torch.device) -> Tensor:
        """Return the cumulative lengths from 0 in every layout, int32 of shape ``(batch + 1,)``."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens
        return torch.arange(self.batch + 1, dtype=torch.int32, device=device) * self.length

    def rows(self, x: Tensor) -> Tensor:
        """Convert a tensor in the caller's layout to ``(T, ...)`` rows of this layout."""
        if self.packed:
            return x if self.shape is None else x.flatten(0, 1)
        x = x.expand(self.batch, self.length, *x.shape[2:]).flatten(0, 1)
        return x if self.indices is None else x.index_select(0, self.indices)

    def seen(self, rows: Tensor) -> Tensor:
        """View ``(T, ...)`` rows in the shape in which the layers call their modules.

        The shape is ``(T, ...)`` unless `whole` is set. With `whole`, the shape is ``(B, L, ...)``,
        or in a packed layout the caller's shape.
        """
        if not self.whole or (self.packed and self.shape is None):
            return rows
        return rows.view(*(self.shape or (self.batch, self.length)), *rows.shape[1:])

    def given(self, rows: Tensor) -> Tensor:
        """Convert ``(T, ...)`` rows to the caller's layout.

        The result has the shape ``(B, L, ...)`` and is 0 at padding. In a packed layout, the result
        has the shape of the caller's packed input.
        """
        if not self.packed:
            return self.padded(rows)
        return rows if self.shape is None else rows.view(*self.shape, *rows.shape[1:])

    def padded(self, rows: Tensor) -> Tensor:
        """Convert ``(T, ...)`` rows to ``(B, L, ...)`` with 0 at padding, in every layout."""
        if self.cu_seqlens is None:
            padded = rows.view(self.batch, self.length, *rows.shape[1:])
            if self.tokens is None:
                return padded
            exists = self.tokens.view(*self.tokens.shape, *[1] * (rows.dim() - 1))
            return padded.masked_fill(~exists, 0.0)
        indices = self.indices
        if indices is None:
            sequence, position = sequence_positions(self.cu_seqlens, rows.shape[0])
            used = (sequence < self.batch).nonzero().flatten()
            indices, rows = (sequence * self.length + position)[used], rows[used]
        packed = ops.Packed(
            rows, indices, self.cu_seqlens, self.max_seqlen, self.batch, self.length
        )
        return ops.pad(packed)

    def exists(self) -> Tensor | None:
        """Return a mask of the tokens that exist in the padded batch, bool of shape ``(B, L)``.

        The result is None for a uniform layout without padding, where every token exists.
        """
        if self.cu_seqlens is None:
            return self.tokens
        if self.indices is None:
            places = torch.arange(self.length, device=self.cu_seqlens.device)
            return places < self.cu_seqlens.diff().unsqueeze(1)
        flat = torch.zeros(
            self.batch * self.length, dtype=torch.bool, device=self.cu_seqlens.device
        )
        return flat.index_fill(0, self.indices, True).view(self.batch, self.length)

    def near(self, window: int) -> Tensor | None:
        """Return a mask that is True where a query and a key are at most `window` tokens apart.

        The distances are measured in the padded batch. The mask is bool of shape
        ``(batch, 1, max_seqlen, max_seqlen)``. The result is None if the distances between rows are
        equal to the distances in the padded batch.
        """
        if self.places is None:
            return None
        apart = (self.places.unsqueeze(-1) - self.places.unsqueeze(-2)).abs()
        return (apart <= window).unsqueeze(1)

    def order(self, device: torch.device) -> Tensor:
        """Return the positions from which the distances between tokens are computed.

        The positions are int64 of shape ``(1, max_seqlen)`` or ``(batch, max_seqlen)``; a uniform
        layout has ``length`` instead of ``max_seqlen``.
        """
        if self.places is not None:
            return self.places
        return torch.arange(self.longest, device=device).unsqueeze(0)

    def positions(self, given: Tensor) -> Tensor:
        """Return the index of each token in its padded or packed sequence, int64 of shape ``(T,)``.

        The index in a padded sequence counts the padding before the token, as in transformers.

        Args:
            given: A tensor on the device of the rows; packed rows are counted by its first dim.
        """
        if self.packed:
            assert self.cu_seqlens is not None
            return sequence_positions(self.cu_seqlens, given.shape[0])[1]
        if self.indices is not None:
            return self.indices % max(self.length, 1)
        places = torch.arange(self.length, device=given.device)
        return places.expand(self.batch, self.length).reshape(-1)

    def sequences(self, rows: Tensor) -> Tensor:
        """Return the number of the sequence of each row, int64 of shape ``(T,)``."""
        if self.cu_seqlens is not None:
            sequence = sequence_positions(self.cu_seqlens, rows.shape[0])[0]
            return sequence.clamp(max=max(self.batch - 1, 0))
        return torch.arange(self.batch, device=rows.device).repeat_interleave(self.length)

    def first(self, rows: Tensor) -> Tensor:
        """Select the first token of each sequence, ``(T, H) → (B, H)``.

        The first token has position 0, as in transformers. If the mask hides position 0, because
        the padding is on the left, the result is the first token that the mask does not hide;
        transformers would return the padding at position 0. A sequence without tokens gives 0.
        """
        if not torch.compiler.is_compiling() and rows.shape[0] == 0:
            return rows.new_zeros(self.batch, rows.shape[1])
        if self.cu_seqlens is None:
            padded = self.padded(rows)
            if self.tokens is None:
                return padded[:, 0]
            place = self.tokens.int().argmax(1)
            return padded[torch.arange(self.batch, device=rows.device), place]
        # A sequence without tokens may start after the last row. Its result is masked below.
        starts = self.cu_seqlens[:-1].long().clamp(max=rows.shape[0] - 1)
        empty = self.cu_seqlens.diff() == 0
        return rows.index_select(0, starts).masked_fill(empty.unsqueeze(1), 0.0)

    def weights(self, weights: Tensor, keys: BatchLayout | None = None) -> Tensor:
        """Convert attention weights of rows to ``(B, heads, L, L)``, 0 at padding.

        The argument has the shape ``(B, heads, max_seqlen, max_seqlen)``. In a packed layout, the
        argument is returned without a change.

        Args:
            weights: The weights of rows.
            keys: Layout of the keys, for attention to the rows of another batch. None means that
                the keys have this layout too.
        """
        return (self if keys is None else keys)._spread(self._spread(weights, 2), 3)

    def _spread(self, weights: Tensor, dim: int) -> Tensor:
        """Give one dimension of attention weights the positions of the padded batch."""
        if self.cu_seqlens is None:
            return weights if self.tokens is None else weights * _at(self.tokens, dim)
        if self.packed:
            return weights
        exists = self.exists()
        assert exists is not None
        sizes = [*weights.shape]
        sizes[dim] = self.length
        if not torch.compiler.is_compiling() and self.max_seqlen == 0:
            return weights.new_zeros(sizes)
        # The token at a position of the padded batch has the index ``cumsum - 1`` in its sequence.
        rank = (exists.cumsum(1) - 1).clamp(min=0)
        return weights.gather(dim, _at(rank, dim).expand(sizes)) * _at(exists, dim)

    def weights_of_rows(self, weights: Tensor) -> Tensor:
        """Convert attention weights from the caller's layout to the layout of the rows.

        This is the inverse of the method `weights`: the argument has the shape
        ``(B, heads, L, L)``, and the result ``(B, heads, max_seqlen, max_seqlen)``.
        """
        if self.cu_seqlens is None or self.packed:
            return weights
        exists = self.exists()
        assert exists is not None
        # The sort puts the tokens before the padding and keeps the order of the tokens.
        order = exists.int().argsort(dim=1, descending=True, stable=True)[:, : self.max_seqlen]
        sizes = (*weights.shape[:2], order.shape[1], weights.shape[3])
        weights = weights.gather(2, order[:, None, :, None].expand(sizes))
        return weights.gather(3, order[:, None, None, :].expand(*sizes[:3], order.shape[1]))


def _at(x: Tensor, dim: int) -> Tensor:
    """View a tensor ``(B, L)`` with four dimensions, where L is the dimension `dim`."""
    return x[:, None, :, None] if dim == 2 else x[:, None, None, :]
