"""Self-attention with relative positions in its logits (DeBERTa)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastbert import ops
from fastbert.config import BertConfig
from fastbert.modules.attention import BertSelfAttention, project
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.linear import Linear
from fastbert.modules.plain import deviation
from fastbert.modules.relative_positions import PositionProjections, Relative, score_scale
from fastbert.ops.attention_context import attention_context
from fastbert.ops.product import needs_gradient


class RelativeSelfAttention(BertSelfAttention):
    """Self-attention ``softmax((q kᵀ + terms) / sqrt(n D)) v`` with n - 1 terms of positions.

    The terms are those of ``ops.relative_attention`` with tables of keys and of queries.

    Args:
        config: Configuration of the model.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
        number: Number of the layer, from 0.
    """

    operation = "relative_attention"

    def __init__(self, config: BertConfig, backend: str | None = None, number: int = 0) -> None:
        """Create the projections."""
        super().__init__(config, backend, number)
        self.positions = PositionProjections(config, backend)
        self.scale = score_scale(config)

    def forward(
        self,
        hidden: Tensor,
        layout: BatchLayout,
        output_attentions: bool = False,
        dropout_seed: Tensor | None = None,
        queries: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the attention of all heads; see `BertSelfAttention.forward`.

        Args:
            hidden: As in `BertSelfAttention.forward`.
            layout: As in `BertSelfAttention.forward`.
            output_attentions: As in `BertSelfAttention.forward`.
            dropout_seed: As in `BertSelfAttention.forward`.
            queries: Rows ``(T, H)`` from which the queries are projected; None means `hidden`. The
                keys and values are always projected from `hidden`.

        Returns:
            As `BertSelfAttention.forward`, with `queries` for the residual connection.

        Raises:
            ValueError: If `layout` has an additive mask.
        """
        if layout.bias is not None:
            raise ValueError(
                "attention_mask: got an additive mask with values other than 0 and -1e4 or less, "
                "allowed: a mask that hides keys, because this family has positions in its logits"
            )
        qkv, residual = self._project(hidden, queries)
        relative, tables = self._tables(layout)
        keys, queries = (None if t is None else self._heads(t) for t in tables)
        options: dict[str, Any] = {
            "position_keys": keys, "position_queries": queries, "scale": self.scale,
            "backend": self.backend,
        }  # fmt: skip
        dropout: dict[str, Any] = {
            "dropout_p": self.dropout_p if self.training else 0.0,
            "dropout_seed": dropout_seed,
        }
        # Distances are those of the padded batch. They are not the distances of the rows if a
        # sequence has padding between its tokens, and then padding is computed too.
        between = layout.places is not None
        exists = layout.exists() if between else None
        ends = None if between else layout.cu_seqlens
        if exists is not None:
            qkv, options["mask"] = layout.padded(qkv), exists[:, None, None]
        else:
            options["mask"] = layout.mask
        q, k, v = self._split(qkv.view(-1, qkv.shape[-1]))
        if ends is None:
            shape = (layout.batch, layout.length, self.heads, self.head_dim)
            q, k, v = (x.unflatten(0, shape[:2]).transpose(1, 2) for x in (q, k, v))
        else:
            longest = layout.max_seqlen
            options |= {"cu_seqlens_q": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}

        def given(weights: Tensor) -> Tensor:
            """Return weights in the caller's layout, 0 at padding."""
            return layout.weights(weights) if exists is None else weights * exists[:, None, :, None]

        weights: Tensor | None = None
        if not output_attentions:
            out = ops.relative_attention(q, k, v, relative.index, **options, **dropout)
        elif needs_gradient(q, *(t for t in tables if t is not None)):
            # The output is computed from the returned weights, so that a loss has a gradient with
            # respect to them.
            _, weights = ops.relative_attention(
                q, k, v, relative.index, return_weights=True, **options
            )
            weights = given(weights)
            of_rows = weights if between else layout.weights_of_rows(weights)
            out = attention_context(of_rows, v, ends, **dropout)
        else:
            out, weights = ops.relative_attention(
                q, k, v, relative.index, return_weights=True, **options, **dropout
            )
            weights = given(weights)
        assert isinstance(out, Tensor)
        if ends is None:
            out = out.transpose(1, 2)
        if exists is not None:
            out = layout.rows(out.reshape(layout.batch, layout.length, -1))
        return out.reshape(hidden.shape), residual, weights

    def tables(self, layout: BatchLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return the index of the distances and both tables of positions for ``ops.encoder``."""
        relative, tables = self._tables(layout)
        absent = relative.table.new_empty(0)
        keys, queries = (absent if table is None else table.to(dtype) for table in tables)
        return relative.index, keys, queries

    def _tables(self, layout: BatchLayout) -> tuple[Relative, list[Tensor | None]]:
        """Project the table; see `PositionProjections.forward`."""
        assert layout.relative is not None
        return self.positions(layout.relative, self.qkv)

    def _project(self, hidden: Tensor, queries: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the projected content, and the rows for the residual connection."""
        if queries is None:
            return project(self.qkv, hidden)
        return self._with_queries(hidden, queries), queries

    def _split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """View the projected content as queries, keys and values, each ``(T, heads, D)``."""
        return qkv.view(-1, 3, self.heads, self.head_dim).unbind(-3)

    def _with_queries(self, hidden: Tensor, queries: Tensor) -> Tensor:
        """Project `queries` to queries, and `hidden` to keys and values, side by side."""
        size = hidden.shape[-1]
        if type(self.qkv) is not Linear or deviation(self.qkv, Linear) is not None:
            return torch.cat((self.qkv(queries)[..., :size], self.qkv(hidden)[..., size:]), -1)
        weights, biases = self.qkv.weight.tensor_split((size,)), (None, None)
        if self.qkv.bias is not None:
            biases = self.qkv.bias.tensor_split((size,))
        parts = (queries, hidden)
        backend = self.qkv.backend
        return torch.cat(
            [
                ops.linear(x, weight, bias, backend=backend)
                for x, weight, bias in zip(parts, weights, biases, strict=True)
            ],
            -1,
        )

    def _heads(self, table: Tensor) -> Tensor:
        return table.unflatten(-1, (self.heads, self.head_dim))


class InterleavedSelfAttention(RelativeSelfAttention):
    """The self-attention of DeBERTa v1, whose projection has one head after another.

    The projection ``qkv`` has no bias. Its 3H outputs are the query, key and value of the first
    head, then those of the second head, and so on. ``q_bias`` and ``v_bias`` have the shape
    ``(H,)``.

    Args:
        config: Configuration of the model.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
        number: Number of the layer, from 0.
    """

    def __init__(self, config: BertConfig, backend: str | None = None, number: int = 0) -> None:
        """Create the projection and its biases."""
        super().__init__(config, backend, number)
        size = config.hidden_size
        self.qkv = Linear(size, 3 * size, backend, bias=False)
        self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(size)) for _ in range(2))

    def content(self, hidden: Tensor) -> Tensor:
        """Project rows; see `BertSelfAttention.content`."""
        return torch.stack(self._split(self._project(hidden, None)[0]), 1).flatten(1)

    def _project(self, hidden: Tensor, queries: Tensor | None) -> tuple[Tensor, Tensor]:
        shape = (self.heads, self.head_dim)
        q_bias, v_bias = self.q_bias.view(shape), self.v_bias.view(shape)
        bias = torch.stack((q_bias, torch.zeros_like(q_bias), v_bias), 1).flatten()
        projected, residual = self._biased(hidden, bias), hidden
        if queries is not None:
            of_queries = self._biased(queries, bias)
            q, (_, k, v) = self._split(of_queries)[0], self._split(projected)
            projected, residual = torch.stack((q, k, v), 2).flatten(1), queries
        return projected, residual

    def _biased(self, rows: Tensor, bias: Tensor) -> Tensor:
        projection = self.qkv
        if deviation(projection, Linear) is not None:
            return projection(rows) + bias
        return ops.linear(rows, projection.weight, bias, backend=projection.backend)

    def _split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.view(-1, self.heads, 3, self.head_dim).unbind(-2)
