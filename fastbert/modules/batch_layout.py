"""How the rows (T, H) that the layers work on are divided into sequences, and the way in and back
out.

Made once per call at the model's door (``inputs.py``) and handed to every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastbert import ops
from fastbert.modules.positions import Rotation
from fastbert.ops.varlen import sequence_positions


@dataclass(frozen=True)
class BatchLayout:
    """Three cases. Uniform: ``cu_seqlens`` is None, row b · length + i is token i of sequence b,
    nothing was moved. Unpadded: ``indices`` int64 (T,) says where in the padded batch each row came
    from. Packed: the caller's tensors have (T, ...) rows already.

    ``cu_seqlens`` int32 (batch + 1,); ``length``: L of the padded batch, the longest sequence when
    packed; ``mask`` bool and ``bias`` floating, 4-D, in the caller's masks only of the uniform
    case: what attention may see. ``rotations``: of each base, what turns the rows' queries and
    keys. ``places`` int64 (batch, max_seqlen): where tokens stood in the padded batch, when
    sequences had padding in their middle and somebody measures distances; else None. ``tokens``
    bool (batch, length): of a uniform layout with padding in it, which rows are tokens. ``shape``:
    of packed rows that the caller holds as (R, C, ...) with R · C = T; None when it is (T, ...).
    """

    batch: int
    length: int
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    indices: Tensor | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    rotations: dict[float, Rotation] = field(default_factory=dict)
    places: Tensor | None = None
    tokens: Tensor | None = None
    shape: tuple[int, int] | None = None

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None and self.indices is None

    def rows(self, x: Tensor) -> Tensor:
        """The caller's (B, L, ...) → the (T, ...) rows of the tokens that exist."""
        if self.packed:
            return x if self.shape is None else x.flatten(0, 1)
        x = x.expand(self.batch, self.length, *x.shape[2:]).flatten(0, 1)
        return x if self.indices is None else x.index_select(0, self.indices)

    def given(self, rows: Tensor) -> Tensor:
        """(T, ...) rows → the caller's layout: (B, L, ...), 0 at padding; the rows when packed."""
        if not self.packed:
            return self.padded(rows)
        return rows if self.shape is None else rows.view(*self.shape, *rows.shape[1:])

    def padded(self, rows: Tensor) -> Tensor:
        """(T, ...) rows → (B, L, ...), 0 at padding, for packed input as well."""
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
        """Bool (B, L): which tokens of the padded batch are rows; None when all are."""
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
        """Bool (batch, 1, max_seqlen, max_seqlen): which pairs stood at most ``window`` apart in
        the padded batch; None where distances between rows say it."""
        if self.places is None:
            return None
        apart = (self.places.unsqueeze(-1) - self.places.unsqueeze(-2)).abs()
        return (apart <= window).unsqueeze(1)

    def order(self, device: torch.device) -> Tensor:
        """int64 (1 or batch, max_seqlen): the places of tokens to measure distances by."""
        if self.places is not None:
            return self.places
        length = self.length if self.cu_seqlens is None else self.max_seqlen
        return torch.arange(length, device=device).unsqueeze(0)

    def first(self, rows: Tensor) -> Tensor:
        """(T, H) → (B, H): each sequence's first token, 0 for a sequence without any.

        That is position 0, as in transformers, unless the mask hides position 0 (padding on the
        left): the pooled token is then the first one that exists, where transformers would take the
        padding.
        """
        if not torch.compiler.is_compiling() and rows.shape[0] == 0:
            return rows.new_zeros(self.batch, rows.shape[1])
        if self.cu_seqlens is None:
            padded = self.padded(rows)
            if self.tokens is None:
                return padded[:, 0]
            place = self.tokens.int().argmax(1)
            return padded[torch.arange(self.batch, device=rows.device), place]
        # A sequence without tokens may start behind the last row; what it points at is masked.
        starts = self.cu_seqlens[:-1].long().clamp(max=rows.shape[0] - 1)
        empty = self.cu_seqlens.diff() == 0
        return rows.index_select(0, starts).masked_fill(empty.unsqueeze(1), 0.0)

    def weights(self, weights: Tensor) -> Tensor:
        """Attention weights (B, heads, max_seqlen, max_seqlen) → (B, heads, L, L), 0 at padding."""
        if self.tokens is not None:
            return weights * (self.tokens[:, None, :, None] & self.tokens[:, None, None, :])
        if self.cu_seqlens is None or self.packed:
            return weights
        exists = self.exists()
        assert exists is not None
        if not torch.compiler.is_compiling() and self.max_seqlen == 0:
            return weights.new_zeros(*weights.shape[:2], self.length, self.length)
        # Token i of the padded row is number cumsum - 1 among those that exist.
        rank = (exists.cumsum(1) - 1).clamp(min=0)
        sizes = (*weights.shape[:2], self.length, weights.shape[3])
        weights = weights.gather(2, rank[:, None, :, None].expand(sizes))
        sizes = (*sizes[:3], self.length)
        weights = weights.gather(3, rank[:, None, None, :].expand(sizes))
        return weights * (exists[:, None, :, None] & exists[:, None, None, :])

    def weights_of_rows(self, weights: Tensor) -> Tensor:
        """The inverse of ``weights``: (B, heads, L, L) → (B, heads, max_seqlen, max_seqlen)."""
        if self.cu_seqlens is None or self.packed:
            return weights
        exists = self.exists()
        assert exists is not None
        # The places of the tokens in order, and then those of padding, where weights are 0.
        order = exists.int().argsort(dim=1, descending=True, stable=True)[:, : self.max_seqlen]
        sizes = (*weights.shape[:2], order.shape[1], weights.shape[3])
        weights = weights.gather(2, order[:, None, :, None].expand(sizes))
        return weights.gather(3, order[:, None, None, :].expand(*sizes[:3], order.shape[1]))
