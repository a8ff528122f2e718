"""The layers of XLNet on rows, for the content stream and for the query stream.

Yang et al. 2019, sections 2.3 to 2.5; the relative positions are those of Dai et al. 2019
(Transformer-XL). The logit of query i and key j is

    ((q_i + r_w) · k_j + (q_i + r_r) · R[i - j] + (q_i + r_s) · S[s_i != s_j]) / sqrt(D),

where R are the projected sinusoids of the distances and S are the two embeddings of segments. With
q' = q + r_w, this is the contract of ``ops.relative_attention``: the positions are its keys, the
term (r_r - r_w) · R is its bias, and the difference of both segment embeddings gives its segment
scores, because the term of S[0] is the same for all keys of a query.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastbert import ops
from fastbert.activations import ACTIVATIONS, of_config
from fastbert.modules.kept_result import KeptResult
from fastbert.ops.dropout import dropout
from fastbert.ops.product import needs_gradient

# The largest number of rows for which transposed weights are kept.
FEW_ROWS = 256


@dataclass(frozen=True)
class Batch:
    """The division of rows into sequences, and what a query may attend to.

    Attributes:
        batch: Number of sequences.
        length: Number of tokens of each padded sequence, L; of the longest sequence if packed.
        memory: Number M of rows of memory before the tokens of each sequence.
        cu_seqlens: Cumulative lengths, int32 of shape ``(batch + 1,)``; None for padded rows.
        mask: Mask of the keys that a query may attend to, bool, 4-D and broadcastable to
            ``(batch, 1, L, M + L)``; None allows all keys.
        mask_of_queries: The mask of the query stream, as `mask`.
        segments: The segments of the tokens, and those of memory and tokens, of shape ``(batch,
            L)`` and ``(batch, M + L)``, or ``(T,)`` for packed rows; None without segments.
    """

    batch: int
    length: int
    memory: int = 0
    cu_seqlens: Tensor | None = None
    mask: Tensor | None = None
    mask_of_queries: Tensor | None = None
    segments: tuple[Tensor, Tensor] | None = None

    def heads(self, rows: Tensor, heads: int) -> Tensor:
        """View rows ``(T, n D)`` as ``(T, n, D)``, or ``(batch, n, T / batch, D)`` if padded."""
        if self.cu_seqlens is not None:
            return rows.unflatten(-1, (heads, -1))
        return rows.view(self.batch, rows.shape[0] // self.batch, heads, -1).transpose(1, 2)


@dataclass
class Runner:
    """Runs the layers of a model with the names of transformers' modules.

    Attributes:
        activation: Name of the activation of the feed-forward in ``config.json``.
        clamp_len: Largest distance that has its own position; -1 sets no limit.
        backend: Requested backend of every operation, or None.
        kept: The projected positions of each layer, kept between calls.
        kept_weights: The transposed weights of each layer, kept between calls with few rows.
    """

    activation: str
    clamp_len: int = -1
    backend: str | None = None
    kept: dict[int, KeptResult] = field(default_factory=dict)
    kept_weights: dict[int, KeptResult] = field(default_factory=dict)

    def positions(self, batch: Batch, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sinusoids of all distances ``(P, width)``, and the row of each distance."""
        table, index = _sinusoids(
            batch.length, batch.memory + batch.length, width, self.clamp_len, like.device
        )
        return table.to(like.dtype), index

    def layer(
        self,
        number: int,
        layer: Any,
        hidden: Tensor,
        queries: Tensor | None,
        memory: Tensor | None,
        batch: Batch,
        positions: tuple[Tensor, Tensor],
        target_mapping: Tensor | None = None,
        want_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Run a layer.

        Args:
            number: Number of the layer.
            layer: The layer, with the parts ``rel_attn`` and ``ff``.
            hidden: Rows of the content stream, of shape ``(T, H)``.
            queries: Rows of the query stream, of shape ``(batch * N, H)``, or None.
            memory: Rows of the memory, of shape ``(batch * M, H)``, or None.
            batch: Division of the rows into sequences.
            positions: The result of `positions`, after dropout.
            target_mapping: Places of the N queries, of shape ``(batch, N, L)``; None if query i has
                the place i.
            want_weights: Whether the attention weights are returned.

        Returns:
            The rows of both streams after the layer, and the attention weights of the streams, each
            of shape ``(batch, n, L, M + L)``.
        """
        parts, heads = layer.rel_attn, layer.rel_attn.q.shape[1]
        seen = hidden if memory is None else _joined(memory, hidden, batch.batch)
        w_q, w_k, w_v = self._projections(number, parts, hidden)
        bias = parts.r_w_bias.flatten()
        if memory is None:
            none = torch.zeros_like(bias)
            qkv = self._linear(hidden, [w_q, w_k, w_v], [bias, none, none])
            q, k, v = qkv.chunk(3, -1)
        else:
            q = self._linear(hidden, w_q, bias)
            k, v = self._linear(seen, [w_k, w_v], None).chunk(2, -1)
        table, position_bias = self._positions(number, parts, positions[0])
        attend = functools.partial(
            self._attend, parts, k=batch.heads(k, heads), v=batch.heads(v, heads), table=table,
            position_bias=position_bias, index=positions[1], batch=batch, want_weights=want_weights,
        )  # fmt: skip
        vectors, weights = attend(batch.heads(q, heads), mask=batch.mask)
        all_weights = [] if weights is None else [weights]
        after = self._output(parts, layer.ff, vectors, hidden)
        if queries is None:
            return after, None, all_weights
        q = self._linear(queries, w_q, None)
        if target_mapping is not None:
            given = q.view(batch.batch, -1, q.shape[-1])
            q = torch.einsum("bnd,bnl->bld", given, target_mapping.to(q.dtype)).flatten(0, 1)
        vectors, weights = attend(batch.heads(q + bias, heads), mask=batch.mask_of_queries)
        if target_mapping is not None:
            given = vectors.view(batch.batch, -1, vectors.shape[-1])
            vectors = torch.einsum("bld,bnl->bnd", given, target_mapping.to(q.dtype)).flatten(0, 1)
        all_weights += [] if weights is None else [weights]
        return after, self._output(parts, layer.ff, vectors, queries), all_weights

    def _linear(self, x: Tensor, weight: Tensor | Sequence[Tensor], bias: Any) -> Tensor:
        product = ops.linear(x, weight, bias, backend=self.backend)
        assert isinstance(product, Tensor)
        return product

    def _projections(self, number: int, parts: Any, hidden: Tensor) -> list[Tensor]:
        """Return the weights of the queries, keys and values, each of shape ``(n D, H)``.

        Products with few rows take a third longer with a weight whose rows are not contiguous. The
        transposed weights are therefore kept between calls with few rows.
        """
        given = [parts.q, parts.k, parts.v]
        views = [_matrix(parameter) for parameter in given]
        if hidden.shape[0] > FEW_ROWS or needs_gradient(hidden, *given):
            return views
        kept = self.kept_weights.setdefault(number, KeptResult())
        return list(kept.of(given, None, lambda: torch.stack(views)).unbind())

    def _positions(self, number: int, parts: Any, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys of the positions ``(P, n, D)`` and their bias ``(P, n)``."""

        def compute() -> tuple[Tensor, Tensor]:
            keys = self._linear(table, _matrix(parts.r), None).unflatten(-1, parts.r.shape[1:])
            return keys, ((parts.r_r_bias - parts.r_w_bias) * keys).sum(-1)

        kept = self.kept.setdefault(number, KeptResult())
        return kept.of([table, parts.r, parts.r_r_bias, parts.r_w_bias], self.backend, compute)

    def _attend(
        self,
        parts: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        position_bias: Tensor,
        index: Tensor,
        batch: Batch,
        mask: Tensor | None,
        want_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of one stream; q contains the bias r_w.

        Returns:
            The output of the heads as rows ``(T, n D)``, and the weights before dropout or None.
        """
        options: dict[str, Any] = {
            "position_keys": table, "position_bias": position_bias, "mask": mask,
            "backend": self.backend,
        }  # fmt: skip
        if batch.segments is not None:
            step = parts.seg_embed[1] - parts.seg_embed[0]  # (n, D)
            constant = ((parts.r_s_bias - parts.r_w_bias) * step).sum(-1)
            of_heads = step if batch.cu_seqlens is not None else step.unsqueeze(1)
            constant = constant if batch.cu_seqlens is not None else constant.unsqueeze(1)
            options["segment_scores"] = (q * of_heads).sum(-1) + constant
            options["segments"] = batch.segments
        if batch.cu_seqlens is not None:
            ends, longest = batch.cu_seqlens, batch.length
            options |= {"cu_seqlens_q": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
        out = ops.relative_attention(
            q, k, v, index, dropout_p=_probability(parts.dropout), return_weights=want_weights,
            **options,
        )  # fmt: skip
        vectors, weights = out if isinstance(out, tuple) else (out, None)
        if mask is not None and mask.shape[-2] > 1:
            vectors, weights = _uniform_where_blind(vectors, weights, v, mask)
        if batch.cu_seqlens is None:
            vectors = vectors.transpose(1, 2).flatten(0, 1)
        return vectors.flatten(1), weights

    def _output(self, parts: Any, feed_forward: Any, vectors: Tensor, residual: Tensor) -> Tensor:
        """Project the output of the heads, and run the feed-forward."""
        projected = self._linear(vectors, parts.o.flatten(1), None)
        hidden = self._norm(parts, projected, residual)
        first, second = feed_forward.layer_1, feed_forward.layer_2
        activation = of_config(gated=False)[self.activation].name
        dropout_p = _probability(feed_forward.dropout)
        if dropout_p > 0.0:
            inner = ops.linear_gelu(
                hidden, first.weight, first.bias, approximate=ACTIVATIONS[activation].approximate,
                backend=self.backend,
            )  # fmt: skip
            inner = dropout(inner, dropout_p, backend=self.backend)
            fed = self._linear(inner, second.weight, None)
        else:
            fed = ops.feed_forward(
                hidden, first.weight, first.bias, second.weight, None, activation=activation,
                backend=self.backend,
            )  # fmt: skip
        return self._norm(feed_forward, fed, hidden, second.bias)

    def _norm(
        self, parts: Any, x: Tensor, residual: Tensor, x_bias: Tensor | None = None
    ) -> Tensor:
        norm = parts.layer_norm
        return ops.layer_norm(
            x, norm.weight, norm.bias, residual=residual, x_bias=x_bias, eps=norm.eps,
            dropout_p=_probability(parts.dropout), backend=self.backend,
        )  # fmt: skip


def _probability(module: nn.Module) -> float:
    return float(module.p) if module.training else 0.0


def _matrix(parameter: Tensor) -> Tensor:
    """View a projection ``(H, n, D)`` as the weight ``(n D, H)`` of a linear layer."""
    return parameter.flatten(1).t()


def _joined(memory: Tensor, hidden: Tensor, batch: int) -> Tensor:
    """Put the memory of each sequence before its tokens."""
    parts = (x.view(batch, -1, x.shape[-1]) for x in (memory, hidden))
    return torch.cat(list(parts), 1).flatten(0, 1)


def _uniform_where_blind(
    vectors: Tensor, weights: Tensor | None, v: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Let a query without any key attend to all keys equally, as transformers does.

    transformers subtracts 1e30 from the logits of hidden keys. If all keys are hidden, all logits
    are equal. This is so for the first token that permutation language modelling predicts.
    """
    blind = ~mask.any(-1, keepdim=True)
    if not torch.compiler.is_compiling() and not bool(blind.any()):
        return vectors, weights
    vectors = torch.where(blind, v.mean(2, keepdim=True), vectors)
    if weights is not None:
        weights = torch.where(blind, 1.0 / v.shape[2], weights)
    return vectors, weights


@functools.lru_cache(maxsize=64)
def _sinusoids(
    queries: int, keys: int, width: int, clamp_len: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the sinusoids of the distances from ``1 - queries`` to ``keys - 1``, and their index.

    Row t belongs to the distance ``t + 1 - queries``. The index has the row of each distance from
    ``1 - N`` to ``N - 1``, where N is the larger of `queries` and `keys`.
    """
    with torch.inference_mode(False):
        distance = torch.arange(1 - queries, max(keys, 1), device=device).float()
        if clamp_len > 0:
            distance = distance.clamp(-clamp_len, clamp_len)
        steps = torch.arange(0, width, 2, device=device).float()
        angles = distance[:, None] * (1 / torch.pow(10000, steps / width))
        longest = max(queries, keys, 1)
        index = torch.arange(1 - longest, longest, device=device) + queries - 1
        index = index.clamp(0, distance.shape[0] - 1).to(torch.int32)
        return torch.cat([angles.sin(), angles.cos()], -1), index


def with_segments(batch: Batch, types: Tensor | None) -> Batch:
    """Return the batch with the segments of its tokens; the memory has the segment 0.

    Args:
        batch: Division of the rows into sequences.
        types: Token types of shape ``(batch, L)``, or ``(T,)`` for packed rows; None without
            segments.
    """
    if types is None:
        return batch
    memory = types.new_zeros(batch.batch, batch.memory)
    keys = types if batch.memory == 0 else torch.cat([memory, types], 1)
    return dataclasses.replace(batch, segments=(types, keys))
