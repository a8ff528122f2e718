"""Word, position and token type embeddings, summed and normalised."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert import ops
from fastbert.config import BertConfig
from fastbert.modules.dropout import Probabilities
from fastbert.modules.inputs import EncoderInput, check_range
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.linear import Linear
from fastbert.modules.operation import OperationModule
from fastbert.modules.plain import deviation
from fastbert.ops.dropout import dropout


class BertEmbeddings(OperationModule):
    """Embeddings ``dropout(LN(word + token type + position))`` of tokens.

    Devlin et al. 2019, figure 2, describes this sum. The result has shape ``(T, H)``. If the tables
    have another width than H, a projection maps the result of the dropout to H columns. A table
    that the architecture lacks is None and adds nothing, and so is the layer norm. A table of task
    types adds one more row for each token (ERNIE), and four tables of coordinates add six rows for
    the box of each token (LayoutLM). A word table that was replaced or has hooks is called as a
    module.

    Args:
        config: Configuration of the model.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
    """

    operation = "embedding"

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        """Create the tables, the layer norm and the projection."""
        super().__init__(backend)
        choices = config.architecture
        size = choices.embedding_size or config.hidden_size
        self.word_embeddings = nn.Embedding(
            config.vocab_size, size, padding_idx=config.pad_token_id
        )
        first = choices.first_position
        self.position_embeddings = (
            nn.Embedding(
                config.max_position_embeddings, size, padding_idx=first - 1 if first else None
            )
            if choices.position_table
            else None
        )
        self.token_type_embeddings = (
            nn.Embedding(config.type_vocab_size, size) if choices.type_table else None
        )
        self.task_type_embeddings = (
            nn.Embedding(choices.task_types, size) if choices.task_types else None
        )
        boxes = choices.box_positions
        self.x_position_embeddings = nn.Embedding(boxes, size) if boxes else None
        self.y_position_embeddings = nn.Embedding(boxes, size) if boxes else None
        self.h_position_embeddings = nn.Embedding(boxes, size) if boxes else None
        self.w_position_embeddings = nn.Embedding(boxes, size) if boxes else None
        self.LayerNorm = (
            LayerNorm(size, config.layer_norm_eps, backend=backend, bias=choices.norm_bias)
            if choices.embedding_norm
            else None
        )
        self.projection = (
            Linear(size, config.hidden_size, backend) if choices.embedding_size else None
        )
        self.dropout_p = Probabilities.of(config).embeddings

    def forward(self, tokens: EncoderInput, dropout_seed: Tensor | None = None) -> Tensor:
        """Embed the tokens.

        Args:
            tokens: The tokens without padding.
            dropout_seed: Seed of the dropout, int64 of shape ``(1,)``; None draws a seed.

        Returns:
            Rows of shape ``(T, H)``.
        """
        embedded = self._embedded(tokens, self.dropout_p if self.training else 0.0, dropout_seed)
        return embedded if self.projection is None else self.projection(embedded)

    def _embedded(
        self, tokens: EncoderInput, dropout_p: float, dropout_seed: Tensor | None
    ) -> Tensor:
        words, norm = self.word_embeddings, self.LayerNorm
        ids, embeds = tokens.ids, tokens.embeds
        if ids is not None and deviation(words, nn.Embedding) is not None:
            embeds = words(ids)
        if self.x_position_embeddings is not None:
            if embeds is None:
                assert ids is not None
                embeds = F.embedding(ids, words.weight, words.padding_idx)
            embeds = embeds + self._of_boxes(tokens)
        types, type_table = _look_up(tokens.token_types, self.token_type_embeddings)
        if self.task_type_embeddings is not None and type_table is not None:
            tasks, task_table = _look_up(tokens.task_types, self.task_type_embeddings)
            assert task_table is not None
            assert types is not None
            types, type_table = _both_types(types, type_table, tasks, task_table)
        positions, position_table = _look_up(tokens.positions, self.position_embeddings)
        if embeds is None:
            table, padding_idx = words.weight, words.padding_idx
        else:
            # `embeds` is used as the word table, and token i has the id i.
            ids, padding_idx = torch.arange(embeds.shape[0], device=embeds.device), None
            table, type_table, position_table = _promoted(embeds, type_table, position_table)
        if norm is None:
            rows = F.embedding(ids, table, padding_idx)
            for index, added in ((types, type_table), (positions, position_table)):
                rows = rows if added is None else rows + F.embedding(index, added)
            return dropout(rows, dropout_p, dropout_seed=dropout_seed, backend=self.backend)
        return ops.embedding(
            ids,
            types,
            positions,
            table,
            type_table,
            position_table,
            norm.weight,
            norm.bias,
            eps=norm.eps,
            dropout_p=dropout_p,
            padding_idx=padding_idx,
            backend=self.backend,
            dropout_seed=dropout_seed,
        )

    def _of_boxes(self, tokens: EncoderInput) -> Tensor:
        """Return the sums of the embeddings of the boxes' sides, heights and widths, ``(T, E)``."""
        boxes = tokens.boxes
        if boxes is None:
            boxes = tokens.positions.new_zeros(tokens.positions.shape[0], 4)
        left, upper, right, lower = boxes.unbind(-1)
        rows: Tensor | None = None
        for name, table, index in (
            ("left", self.x_position_embeddings, left),
            ("upper", self.y_position_embeddings, upper),
            ("right", self.x_position_embeddings, right),
            ("lower", self.y_position_embeddings, lower),
            ("lower - upper", self.h_position_embeddings, lower - upper),
            ("right - left", self.w_position_embeddings, right - left),
        ):
            assert table is not None
            check_range(f"bbox, {name}", index, table.weight.shape[0])
            row = F.embedding(index, table.weight)
            rows = row if rows is None else rows + row
        assert rows is not None
        return rows


def _look_up(
    index: Tensor | None, table: nn.Embedding | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return `index` and the weight of `table`, or ``(None, None)`` if `table` is None."""
    if table is None:
        return None, None
    weight = table.weight
    if table.padding_idx is not None and weight.requires_grad and torch.is_grad_enabled():
        weight = _FixedRow.apply(weight, table.padding_idx)
    return index, weight


def _both_types(
    types: Tensor, type_table: Tensor, tasks: Tensor | None, task_table: Tensor
) -> tuple[Tensor, Tensor]:
    """Return one index and one table for the sums of token types and task types.

    Without `tasks`, every token has the task type 0.
    """
    if tasks is None:
        return types, type_table + task_table[0]
    table = type_table[:, None] + task_table
    return types * task_table.shape[0] + tasks, table.flatten(0, 1)


class _FixedRow(torch.autograd.Function):
    """Returns a table, and sets one row of its gradient to 0, as ``padding_idx`` does in torch."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, row: int) -> Tensor:
        """Return the table."""
        ctx.row = row
        return table.view_as(table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the table, with 0 in the row ``ctx.row``."""
        gradient = gradient.clone()
        gradient[ctx.row] = 0.0
        return gradient, None


def _promoted(*tables: Tensor | None) -> list[Tensor | None]:
    """Convert the tables to their common dtype; a table that is None stays None."""
    dtypes = (table.dtype for table in tables if table is not None)
    dtype = functools.reduce(torch.promote_types, dtypes)
    return [None if table is None else table.to(dtype) for table in tables]
