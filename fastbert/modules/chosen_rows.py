"""The last layer in training, computed only for the rows that a head reads.

A head reads the first token of each sequence, and some heads also read the tokens with a label. The
last layer needs only the keys and values of the other rows. The queries, the output projection and
the feed-forward of the other rows are not computed, because they do not change the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastbert import ops
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.layer import BertLayer
from fastbert.ops.varlen import gather_rows

# A function that takes the layout of all rows and returns a mask of the rows that a head reads
# besides the first tokens, bool of shape (T,), or None if the head reads the first tokens only.
Reads = Callable[[BatchLayout], Tensor | None]


def first_tokens(layout: BatchLayout) -> None:
    """Return None, which means that the head reads only the first tokens; see `Reads`."""


class ChosenRows(NamedTuple):
    """The rows that a head reads, which include the first row of each sequence.

    Attributes:
        indices: Indices of the chosen rows among all rows, int64 of shape ``(N,)``, increasing.
        layout: Division of the chosen rows into packed sequences.
    """

    indices: Tensor
    layout: BatchLayout

    def first(self, rows: Tensor) -> Tensor:
        """Select the first token of each sequence, ``(N, H) → (B, H)``; 0 for an empty sequence."""
        ends = self.layout.cu_seqlens
        if ends is None or bool((ends.diff() == 0).any()):
            return self.layout.first(rows)
        return gather_rows(rows, ends[:-1].long())


def choose_rows(hidden: Tensor, layout: BatchLayout, reads: Reads) -> ChosenRows:
    """Return the rows that a head reads, and their division into sequences.

    Args:
        hidden: All rows, of shape ``(T, H)``, on the CPU.
        layout: Division of the rows into sequences.
        reads: Function that returns a mask of the rows that the head reads; see `Reads`.
    """
    total, ends = hidden.shape[0], layout.ends(hidden.device).long()
    marked = reads(layout)
    chosen = hidden.new_zeros(total, dtype=torch.bool) if marked is None else marked.clone()
    # A sequence without tokens may start after the last row.
    chosen[ends[:-1][ends[:-1] < total]] = True
    indices = chosen.nonzero().flatten()
    own_ends = torch.searchsorted(indices, ends).int()
    longest = int(own_ends.diff().max()) if layout.batch else 0
    return ChosenRows(indices, BatchLayout(layout.batch, longest, own_ends, longest))


def run_layer(layer: BertLayer, hidden: Tensor, layout: BatchLayout, chosen: ChosenRows) -> Tensor:
    """Compute the output of a layer for the chosen rows only, of shape ``(N, H)``.

    Args:
        layer: A layer for which ``layer_modules.may_choose_rows`` returns True.
        hidden: All rows before the layer, of shape ``(T, H)``.
        layout: Division of the rows into sequences.
        chosen: The rows of the output, as `choose_rows` returns them.
    """
    attention = layer.attention.self
    projection, size = attention.qkv, hidden.shape[1]
    sizes = [size, 2 * size]
    weight, of_keys = projection.weight.split(sizes)
    bias, bias_of_keys = (None, None) if projection.bias is None else projection.bias.split(sizes)
    served = projection.backend
    kv, hidden = ops.linear(hidden, of_keys, bias_of_keys, return_residual=True, backend=served)
    read = gather_rows(hidden, chosen.indices)
    q, residual = ops.linear(read, weight, bias, return_residual=True, backend=served)
    k, v = kv.view(-1, 2, attention.heads, attention.head_dim).unbind(1)
    attended = ops.attention_varlen(
        q.view(-1, attention.heads, attention.head_dim),
        k,
        v,
        chosen.layout.cu_seqlens,
        layout.ends(hidden.device),
        chosen.layout.max_seqlen,
        layout.longest,
        backend=attention.backend,
    )
    rows = attended[0] if isinstance(attended, tuple) else attended
    read = layer.attention.output(rows.view(q.shape), residual)
    return layer.output(read, layer.intermediate)
