"""One encoder layer in training as one autograd function, computed in C++ on the CPU.

If a small layer runs as separate operations, the second of two threads is idle for a tenth of the
time, while Python goes from one operation to the next. `cpu_layer` is used only if nothing observes
the operators (see `register.is_watched`). If something observes them, such as a profiler, the
operations run one by one, and the results have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.ops.register import first_derivative


class Sequences(NamedTuple):
    """The division of the rows into sequences, and the rows that are queries.

    Attributes:
        chosen: Indices of the rows that are queries, int64 of shape ``(N,)``, increasing; None if
            all rows are queries.
        cu_seqlens_q: Cumulative numbers of queries, int32 of shape ``(batch + 1,)``; None if every
            sequence has `max_seqlen_k` rows.
        cu_seqlens_k: Cumulative lengths of the sequences, in the form of `cu_seqlens_q`.
        max_seqlen_q: Largest number of queries of a sequence.
        max_seqlen_k: Length of the longest sequence.
        batch: Number of sequences.
    """

    chosen: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    batch: int


class LayerSettings(NamedTuple):
    """The sizes and the options of a layer.

    Attributes:
        dropouts: Dropout probabilities of the attention weights, of the output projection after
            attention, and of the feed-forward.
        heads: Number of attention heads.
        projections: Number of weights whose products, side by side, are q, k and v: 1 or 3.
        inner_projections: Number of weights of the first product of the feed-forward: 1, or 2 if
            the activation is gated.
        window: Largest distance, in tokens, between a query and a key that the query attends to; -1
            sets no limit.
        pre_norm: Whether the layer norms come before attention and the feed-forward. The last two
            values of `dropouts` must then be 0.
        eps: Term that is added to the variance in the layer norms.
        activation: Name of an activation in ``fastbert.activations``.
        dtype: Dtype of the products and of attention: fp32, or the dtype of autocast.
    """

    dropouts: tuple[float, float, float]
    heads: int
    projections: int
    inner_projections: int
    window: int
    pre_norm: bool
    eps: float
    activation: str
    dtype: torch.dtype


def cpu_layer(
    hidden: Tensor,
    parameters: Sequence[Tensor],
    sequences: Sequences,
    seeds: Sequence[Tensor],
    rotation: Sequence[Tensor],
    settings: LayerSettings,
) -> Tensor:
    """Run a layer on rows; the result is differentiable once.

    The caller must have chosen the backend and checked the tensors.

    Args:
        hidden: Rows of shape ``(T, H)`` in fp32.
        parameters: The parameters of the layer in fp32, in the order of ``ops.encoder``. A tensor
            without elements stands for an absent parameter.
        sequences: Division of the rows into sequences.
        seeds: Seeds of the three dropouts, each int64 of shape ``(1,)``; empty without dropout.
        rotation: Cosines and sines of the rotary embeddings of q and k, two tensors of shape
            ``(T, D / 2)``; empty without rotary embeddings.
        settings: The sizes and the options of the layer.

    Returns:
        The output rows of the layer, of the shape of `hidden`, or ``(N, H)`` if
        ``sequences.chosen`` has N indices.
    """
    return _CpuLayer.apply(sequences, seeds, rotation, settings, hidden, *parameters)


class _CpuLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        sequences: Sequences,
        seeds: Sequence[Tensor],
        rotation: Sequence[Tensor],
        settings: LayerSettings,
        hidden: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        y, *intermediates = torch.ops.fastbert_C.layer_forward(
            hidden, parameters, *sequences[:3], seeds, rotation, settings.dropouts,
            *sequences[3:], *settings[1:],
        )  # fmt: skip
        ctx.numbers, ctx.settings = sequences[3:], settings
        groups = (parameters, intermediates, sequences[:3], seeds, rotation)
        ctx.ends = list(accumulate(map(len, groups), initial=1))
        ctx.save_for_backward(hidden, *chain(*groups))
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        parameters, intermediates, rows, seeds, rotation = (
            saved[begin:end] for begin, end in pairwise(ctx.ends)
        )
        gradients = torch.ops.fastbert_C.layer_backward(
            dy, saved[0], parameters, intermediates, *rows, seeds, rotation, ctx.settings.dropouts,
            *ctx.numbers, *ctx.settings[1:],
        )  # fmt: skip
        needed = ctx.needs_input_grad[4:]
        wanted = [g if needs else None for g, needs in zip(gradients, needed, strict=True)]
        return None, None, None, None, *wanted
