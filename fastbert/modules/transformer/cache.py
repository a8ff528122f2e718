"""The keys and values of generation: those of the sources, and those of the generated tokens.

A step of generation adds one slot for each beam of a source. The beams of a source share its slots,
and a mask has the slots of the tokens from which each beam continues. When the beams are chosen
anew, only the mask is reordered, and no key is copied. A step reads as many keys as it would read
if each beam had its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert import ops
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.transformer.decoder import TransformerDecoder
from fastbert.modules.transformer.decoder_layer import CausalSelfAttention, CrossAttention

# The number of slots of a new cache; the number is doubled when the slots are used up.
FIRST_SLOTS = 32


class Cache:
    """The keys and values to which the rows of a step of generation attend, for all layers.

    The rows of a step are those of the first source, then those of the second source, and so on.
    Every source has the same number of rows, called its beams. A source that is finished leaves.

    Args:
        decoder: The decoder.
        source_rows: The encoder's output, of shape ``(T, H)``.
        source: Division of `source_rows` into sequences.
    """

    def __init__(
        self, decoder: TransformerDecoder, source_rows: Tensor, source: BatchLayout
    ) -> None:
        """Compute the keys and values of the sources."""
        self.decoder = decoder
        layers = [layer.cross_attention.self for layer in decoder.layer]
        self.of_source = [layer.keys_and_values(source_rows) for layer in layers]
        device = source_rows.device
        self.source_ends, self.source_longest = source.ends(device), source.longest
        self.live = torch.arange(source.batch, device=device)
        keys = self.of_source[0][0]
        shape = (len(layers), source.batch, FIRST_SLOTS, 2, *keys.shape[1:])
        self.stored = keys.new_empty(shape)
        self.slots = self.beams = 0
        # Bool (sources, beams, slots): whether the token of a slot precedes the token of a beam.
        # None means that every source has one beam.
        self.seen: Tensor | None = None

    def advance(self, rows: Tensor, beams: int) -> Tensor:
        """Run all layers for one token of each beam.

        Args:
            rows: Embedded tokens of shape ``(sources * beams, H)``.
            beams: Number of rows of each source.

        Returns:
            Rows after the last layer, of the shape of `rows`.
        """
        self.begin(beams)
        return self.decoder(rows, self).rows

    def begin(self, beams: int) -> None:
        """Add the slots of a step.

        Args:
            beams: Number of rows of each source.
        """
        first, self.slots = self.slots, self.slots + beams
        layers, sources, capacity, *sizes = self.stored.shape
        if self.slots > capacity:
            larger = self.stored.new_empty(layers, sources, 2 * self.slots, *sizes)
            larger[:, :, :first] = self.stored[:, :, :first]
            self.stored = larger
        if self.seen is not None:
            own = torch.eye(beams, dtype=torch.bool, device=self.live.device)
            self.seen = torch.cat([self.seen, own.expand(sources, -1, -1)], dim=2)
        if beams != self.beams:
            self.beams = beams
            self._count_rows()
        used = self.stored[:, :, : self.slots]
        self.new = used[:, :, first:].unbind(0)
        # Each key tensor is (sources, heads, slots, D), and so is each value tensor.
        self.keys, self.values = (used[:, :, :, i].transpose(2, 3).unbind(0) for i in (0, 1))

    def _count_rows(self) -> None:
        """Set the boundaries of the rows of all sources; a source that left has no rows."""
        counts = torch.zeros_like(self.source_ends)
        counts[self.live + 1] = self.beams
        self.ends = counts.cumsum(0, dtype=torch.int32)

    def reorder(self, parents: Tensor) -> None:
        """Choose the beams of the next step.

        Args:
            parents: For each beam of the next step, the beam of this step from which it continues;
                int64 of shape ``(sources, beams)``.
        """
        if self.seen is None:
            self.seen = torch.ones(
                *parents.shape, self.slots, dtype=torch.bool, device=parents.device
            )
        else:
            self.seen = self.seen.gather(1, parents.unsqueeze(2).expand(-1, -1, self.slots))

    def keep(self, sources: Tensor) -> None:
        """Let all sources leave except for some.

        Args:
            sources: Increasing indices of the sources that stay, int64 of shape ``(N,)``.
        """
        self.live = self.live[sources]
        self.stored = self.stored.index_select(1, sources)
        if self.seen is not None:
            self.seen = self.seen[sources]
        self._count_rows()

    # The rows of a step attend to these keys; see ``decoder_layer.Attention``.

    def to_target(self, module: CausalSelfAttention, qkv: Tensor) -> tuple[Tensor, None]:
        """Store the keys and values of the rows, and attend to the tokens generated so far."""
        sizes = (module.heads, module.head_dim)
        qkv = qkv.view(-1, self.beams, 3, *sizes)
        self.new[module.number].copy_(qkv[:, :, 1:])
        out = ops.attention(
            qkv[:, :, 0].transpose(1, 2),
            self.keys[module.number],
            self.values[module.number],
            mask=None if self.seen is None else self.seen.unsqueeze(1),
            backend=module.backend,
        )
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).reshape(-1, sizes[0] * sizes[1]), None

    def to_source(self, module: CrossAttention, q: Tensor) -> tuple[Tensor, None]:
        """Attend to the tokens of the source; the beams of a source read its keys once."""
        keys, values = self.of_source[module.number]
        out = ops.attention_varlen(
            q.view(-1, module.heads, module.head_dim),
            keys,
            values,
            self.ends,
            self.source_ends,
            self.beams,
            self.source_longest,
            backend=module.backend,
        )
        assert isinstance(out, Tensor)
        return out.view(q.shape), None
