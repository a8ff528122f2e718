"""Relative positions inside attention: the shared table, and its projections in each layer.

DeBERTa: He et al. 2021 (ICLR), sections 3.1 and 3.2; DeBERTaV3: He et al. 2023.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastbert import ops
from fastbert.config import BertConfig, RelativePositions
from fastbert.modules.joined_linear import JoinedLinear
from fastbert.modules.kept_result import KeptResult
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.linear import Linear
from fastbert.modules.plain import deviation
from fastbert.modules.quantized_linear import QuantizedLinear
from fastbert.ops.dropout import dropout


class Relative(NamedTuple):
    """The relative positions of one call of an encoder.

    Attributes:
        table: Embedded positions of shape ``(P, H)``, one row for each position or bucket.
        index: Row of each distance, int32 of shape ``(2 L - 1,)``; see ``ops.relative_attention``.
        index_from_low: `index` less `low`.
        low: First row that a distance has.
        high: Last row that a distance has.
    """

    table: Tensor
    index: Tensor
    index_from_low: Tensor
    low: int
    high: int


class RelativeTable(nn.Module):
    """The table of relative positions, which all layers share.

    Args:
        config: Configuration of the model.
        backend: Requested backend; see ``OperationModule``. None lets the operation choose.
    """

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        """Create the table and its layer norm."""
        super().__init__()
        choices = config.architecture.relative_positions
        assert choices is not None
        self.choices = choices
        size = config.hidden_size
        self.embeddings = nn.Embedding(2 * choices.span, size)
        self.LayerNorm = (
            LayerNorm(size, config.layer_norm_eps, backend=backend) if choices.norm else None
        )

    def forward(self, length: int) -> Relative:
        """Return the relative positions of sequences of up to `length` tokens."""
        weight = self.embeddings.weight
        rows = _rows(length, self.choices, weight.device)
        table = weight if self.LayerNorm is None else self.LayerNorm(weight)
        return Relative(table, *rows)


@functools.lru_cache(maxsize=256)
def _rows(
    length: int, choices: RelativePositions, device: torch.device
) -> tuple[Tensor, Tensor, int, int]:
    """Return the fields of `Relative` after the table."""
    with torch.inference_mode(False):
        index = rows_of_distances(length, choices).to(device)
        low, high = (int(x) for x in index.aminmax())
        return index, index - low, low, high


def rows_of_distances(length: int, choices: RelativePositions) -> Tensor:
    """Return the row of each distance from ``1 - length`` to ``length - 1``, int32.

    The distance d of query i and key j is i - j. Without buckets, d has the row ``d + span``. With
    buckets, a distance of at most ``span / 2`` has the same row, and longer distances share rows,
    whose number grows with the logarithm of the distance. Rows outside the table are replaced by
    its first or last row.

    Args:
        length: Length of the longest sequence, at least 1.
        choices: The properties of the positions.
    """
    distance = torch.arange(1 - length, length)
    if choices.farthest is not None:
        middle = choices.span // 2
        far = distance.abs().clamp(min=middle).to(torch.float32)
        growth = torch.log(torch.tensor((choices.farthest - 1) / middle, dtype=torch.float32))
        bucket = torch.ceil(torch.log(far / middle) / growth * (middle - 1)) + middle
        bucket = bucket.long() * distance.sign()
        distance = torch.where(distance.abs() <= middle, distance, bucket)
    return (distance + choices.span).clamp(0, 2 * choices.span - 1).to(torch.int32)


class PositionProjections(nn.Module):
    """The keys and queries of the positions in one layer.

    A layer whose content and positions share their projections has no parameters here, and projects
    the table by the projection of the content.

    Args:
        config: Configuration of the model.
        backend: Requested backend; see ``OperationModule``. None lets the operation choose.

    Attributes:
        key: Projection of the keys of positions; None if shared or absent.
        query: Projection of the queries of positions; None if shared or absent.
        dropout_p: Probability of the dropout of the table.
    """

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        """Create the projections."""
        super().__init__()
        choices = config.architecture.relative_positions
        assert choices is not None
        self.choices = choices
        size = config.hidden_size
        own = not choices.shared
        bias = not choices.interleaved
        self.key = Linear(size, size, backend, bias=bias) if own and choices.keys else None
        self.query = Linear(size, size, backend) if own and choices.queries else None
        self.dropout_p = config.hidden_dropout_prob
        self._kept, self._kept_own = KeptResult(), dict[str, KeptResult]()

    def forward(self, relative: Relative, qkv: nn.Module) -> tuple[Relative, list[Tensor | None]]:
        """Project the rows of the table.

        Only the rows that a distance has are projected, unless a projection must be called as its
        host calls it.

        Args:
            relative: The positions of the call.
            qkv: The projection of the content to queries, keys and values.

        Returns:
            The positions, with a table and an index of the projected rows; and the keys and the
            queries of the positions, each of shape ``(P, H)``, or None if the layer has none.
        """
        choices = self.choices
        parts = [qkv] if choices.shared else [p for p in (self.key, self.query) if p is not None]
        if all(map(_is_plain, parts)):
            _, _, index, low, high = relative
            relative = Relative(relative.table[low : high + 1], index, index, 0, high - low)
        rows = dropout(relative.table, self.dropout_p if self.training else 0.0)
        if choices.shared:
            queries, keys = self._by_content(qkv, rows)
            return relative, [keys if choices.keys else None, queries if choices.queries else None]
        return relative, [self._by_own(rows, part) for part in (self.key, self.query)]

    def _by_own(self, rows: Tensor, part: nn.Module | None) -> Tensor | None:
        """Project rows by a projection of the positions."""
        if part is None:
            return None
        if type(part) is not Linear or deviation(part, Linear) is not None:
            return part(rows.unsqueeze(0)).squeeze(0)
        bias = [] if part.bias is None else [part.bias]
        kept = self._kept_own.setdefault("key" if part is self.key else "query", KeptResult())
        return kept.of([rows, part.weight, *bias], part.backend, lambda: part(rows))

    def _by_content(self, qkv: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Project rows to the queries and keys of the content's projection."""
        size = rows.shape[1]
        if not _is_plain(qkv) and isinstance(qkv, JoinedLinear):
            queries, keys = (part(rows.unsqueeze(0)).squeeze(0) for part in list(qkv.parts)[:2])
            return queries, keys
        if not _is_plain(qkv) or isinstance(qkv, QuantizedLinear):
            both = qkv(rows)[:, : 2 * size]
            return both[:, :size], both[:, size:]
        weights: list[Tensor]
        biases: list[Tensor] | None
        if isinstance(qkv, JoinedLinear):
            weights, biases = qkv.weights_and_biases()
            weights, biases = weights[:2], biases and biases[:2]
        else:
            weights = [qkv.weight[: 2 * size]]
            biases = None if qkv.bias is None else [qkv.bias[: 2 * size]]

        def product() -> Tensor:
            return ops.linear(rows, weights, biases, backend=qkv.backend)

        both = self._kept.of([rows, *weights, *(biases or [])], qkv.backend, product)
        return both[:, :size], both[:, size:]


def _is_plain(projection: nn.Module) -> bool:
    return isinstance(projection, QuantizedLinear) or deviation(projection, Linear) is None


def score_scale(config: BertConfig) -> float:
    """Return the factor of the attention logits, ``1 / sqrt(D (1 + number of terms))``."""
    choices = config.architecture.relative_positions
    terms = 1 if choices is None else 1 + choices.keys + choices.queries
    return 1.0 / math.sqrt(config.head_dim * terms)
