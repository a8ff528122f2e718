"""One layer of an encoder in training as one function of autograd, in C++ on the CPU.

With separate operations, the second thread is idle for a tenth of the time of a small layer, while
Python goes from one operation to the next. This function is used where nothing observes the
operators (see ``fastbert.ops.register``). Otherwise the operations run one by one, with the same
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.ops.register import first_derivative


class Sequences(NamedTuple):
    """The division of the rows into sequences, and the queries.

    Attributes:
        chosen: Indices of the rows that are queries, int64 of shape ``(N,)``, increasing; None if
            all rows are queries.
        cu_seqlens_q: Cumulative numbers of queries, int32 of shape ``(batch + 1,)``; None if every
            sequence has `max_seqlen_k` rows.
        cu_seqlens_k: Cumulative lengths of the sequences, as `cu_seqlens_q`.
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
    """The numbers of a layer.

    Attributes:
        dropouts: Probabilities of the dropouts of attention, of its output projection and of the
            feed-forward.
        heads: Number of attention heads.
        projections: Number of weights whose results, side by side, are q, k and v: 1 or 3.
        inner_projections: Number of weights of the first product of the feed-forward: 1, or 2 if
            the activation is gated.
        window: Largest distance of a key; -1 without a limit.
        pre_norm: Whether the layer norms are before attention and feed-forward. The last two
            dropouts are then 0.
        eps: Term that is added to the variance in the layer norms.
        activation: Name of the activation.
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
    """Run a layer on rows, with a gradient.

    The caller has chosen the backend and checked the tensors.

    Args:
        hidden: Rows of shape ``(T, H)`` in fp32.
        parameters: The parameters of the layer in fp32, in the order of ``ops.encoder``. A tensor
            without elements is absent.
        sequences: Division of the rows.
        seeds: Seeds of the three dropouts, int64 of shape ``(1,)``; none without dropout.
        rotation: Cosines and sines of shape ``(T, D / 2)`` by which q and k are rotated, or none.
        settings: The numbers of the layer.

    Returns:
        The rows after the layer, of the shape of `hidden`; ``(N, H)`` with chosen rows.
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
