"""The keys and values of generation for the call that runs all layers (``one_call``).

Each row of a step has a slot. A table says which slot holds each earlier token of a row. When the
beams are chosen anew, only this table is reordered, and no key is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert import ops
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.transformer.decoder import TransformerDecoder
from fastbert.modules.transformer.one_call import OneCall

# The number of positions of a new cache; the number is doubled when the positions are used up.
FIRST_POSITIONS = 32


class SlotCache:
    """The keys and values to which the rows of a step attend; as ``cache.Cache``.

    Args:
        decoder: The decoder.
        call: The arguments of the call for all layers.
        source_rows: The encoder's output, of shape ``(T, H)``.
        source: Division of `source_rows` into sequences.
    """

    def __init__(
        self,
        decoder: TransformerDecoder,
        call: OneCall,
        source_rows: Tensor,
        source: BatchLayout,
    ) -> None:
        """Compute the keys and values of the sources."""
        self.decoder, self.call = decoder, call
        device = source_rows.device
        pairs = [layer.cross_attention.self.keys_and_values(source_rows) for layer in decoder.layer]
        tokens, heads, size = pairs[0][0].shape
        self.of_source = source_rows.new_empty(len(pairs), 2, heads, tokens, size)
        for number, pair in enumerate(pairs):
            for part, rows in enumerate(pair):
                self.of_source[number, part] = rows.transpose(0, 1)
        self.source_ends = source.ends(device)
        self.live = torch.arange(source.batch, device=device)
        self.position = 0
        self.stored = source_rows.new_empty(len(pairs), 2, 0, heads, FIRST_POSITIONS, size)
        self.slots = torch.zeros(source.batch, FIRST_POSITIONS, dtype=torch.int32, device=device)

    def advance(self, rows: Tensor, beams: int) -> Tensor:
        """Run all layers for one token of each row.

        Args:
            rows: Embedded tokens of shape ``(sources * beams, H)``.
            beams: Number of rows of each source.

        Returns:
            Rows after the last layer, and after the norm that follows it, if there is one.
        """
        self._grow(rows.shape[0])
        sources = self.live.to(torch.int32).repeat_interleave(beams)
        rows = ops.decoder_step(
            rows, self.call.parameters, self.stored, self.slots, self.position,
            self.of_source, self.source_ends, sources, **self.call.options,
        )  # fmt: skip
        self.slots[:, self.position] = torch.arange(rows.shape[0], dtype=torch.int32)
        self.position += 1
        norm = self.decoder.final_norm
        return rows if norm is None else norm(rows)

    def _grow(self, rows: int) -> None:
        """Make sure that the cache has a slot for each row, and room for one more position."""
        layers, parts, slots, heads, positions, size = self.stored.shape
        if rows <= slots and self.position < positions:
            return
        longer = positions if self.position < positions else 2 * positions
        larger = self.stored.new_empty(layers, parts, max(rows, slots), heads, longer, size)
        larger[:, :, :slots, :, : self.position] = self.stored[:, :, :, :, : self.position]
        table = self.slots.new_zeros(self.slots.shape[0], longer)
        table[:, : self.position] = self.slots[:, : self.position]
        self.stored, self.slots = larger, table

    def reorder(self, parents: Tensor) -> None:
        """Choose the beams of the next step; as ``Cache.reorder``."""
        self.slots = self.slots[self._rows_of_sources()[:, :1] + parents].flatten(0, 1)

    def keep(self, sources: Tensor) -> None:
        """Let all sources leave except for some; as ``Cache.keep``."""
        self.slots = self.slots[self._rows_of_sources()[sources]].flatten(0, 1)
        self.live = self.live[sources]

    def _rows_of_sources(self) -> Tensor:
        """Return the rows of each source, int64 of shape ``(sources, beams)``."""
        rows = torch.arange(self.slots.shape[0], device=self.live.device)
        return rows.view(self.live.shape[0], -1)
