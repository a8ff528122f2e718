"""The embedding of a BERT input: three look-ups, their sum, layer norm and dropout in one pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import reference
from fastbert.ops import backend as backends
from fastbert.ops import closed_form
from fastbert.ops.arguments import (
    dropout_seed as draw_seed,
)
from fastbert.ops.arguments import (
    flatten_rows,
    require,
    require_floating,
    require_integer,
    require_same_device,
    require_shape,
)
from fastbert.ops.register import differentiable, once_differentiable, operator


def embedding(
    ids: Tensor,
    token_types: Tensor,
    positions: Tensor,
    word_table: Tensor,
    type_table: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-12,
    dropout_p: float = 0.0,
    padding_idx: int | None = None,
    backend: str | None = None,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """Look up and sum three embeddings of each token, normalize the sum, and apply dropout.

    The result is ``dropout(LN(word[ids] + type[token_types] + position[positions]))``.

    Args:
        ids: Token ids, int64 or int32 of shape ``(T,)`` or ``(B, L)``.
        token_types: Token type ids of the same shape.
        positions: Positions of the same shape.
        word_table: Word embeddings of shape ``(V, N)``, in a floating dtype.
        type_table: Token type embeddings of shape ``(types, N)`` in the same dtype.
        position_table: Position embeddings of shape ``(P, N)`` in the same dtype.
        weight: Scale of the layer norm, of shape ``(N,)``, in any floating dtype.
        bias: Shift of the layer norm, of shape ``(N,)``, in any floating dtype.
        eps: Added to the variance.
        dropout_p: Probability with which an element is dropped.
        padding_idx: Row of `word_table` that gets no gradient, or None.
        backend: ``"reference"``, ``"triton"``, ``"cuda"`` or ``"cpu"``; None lets
            ``fastbert.ops.backend.resolve`` choose.
        dropout_seed: Seed of the dropout mask, int64 of shape ``(1,)``; None draws one from torch's
            generator of the device. The same seed gives the same mask on every backend.

    Returns:
        Tensor of shape ``(T, N)`` or ``(B, L, N)`` in the dtype of the tables.

    Raises:
        IndexError: If an id is out of range on the CPU. On a GPU it is an error of the device,
            except with ``backend="triton"``, which makes the row NaN because a look would
            synchronise.
        ValueError: If a shape, a device or a value is not allowed, or if `backend` cannot serve the
            call.
        TypeError: If a dtype is not allowed.

    Note:
        Devlin et al. 2019, figure 2.
    """
    for name, index in (("ids", ids), ("token_types", token_types), ("positions", positions)):
        require_integer(name, index)
        require_shape(name, index, tuple(ids.shape))
    columns = word_table.shape[-1]
    for name, table in (
        ("word_table", word_table),
        ("type_table", type_table),
        ("position_table", position_table),
    ):
        require_floating(name, table)
        shape = f"shape {tuple(table.shape)}"
        require(table.dim() == 2 and table.shape[1] == columns, name, shape, f"(rows, {columns})")
        require(table.dtype == word_table.dtype, name, table.dtype, f"{word_table.dtype}, as words")
    require_shape("weight", weight, (columns,))
    require_shape("bias", bias, (columns,))
    require_same_device(
        "word_table", word_table.device, ids=ids, token_types=token_types, positions=positions,
        type_table=type_table, position_table=position_table, weight=weight, bias=bias,
    )  # fmt: skip
    seed = draw_seed(dropout_p, dropout_seed, word_table.device)
    request = backends.Request(word_table.device.type, word_table.dtype, columns=columns)
    choice = backends.resolve("embedding", backend, request)
    indices = (ids.reshape(-1), token_types.reshape(-1), positions.reshape(-1))
    tables = tuple(flatten_rows(t) for t in (word_table, type_table, position_table))
    padding = -1 if padding_idx is None else padding_idx
    y, _, _ = _embedding(
        *indices, *tables, weight, bias, seed, eps, dropout_p, padding, choice.backend
    )
    return y.view(*ids.shape, columns)


# The operator: indices (T,) → y (T, N), mean and rstd (T,). A padding_idx of -1 is none.


def _fake(a: Any) -> tuple[Tensor, ...]:
    words = a.word_table
    y = words.new_empty(a.ids.shape[0], words.shape[1])
    mean = words.new_empty(a.ids.shape[0], dtype=torch.promote_types(words.dtype, torch.float32))
    return y, mean, torch.empty_like(mean)


def _backward_fake(a: Any) -> tuple[Tensor, ...]:
    like = (a.word_table, a.type_table, a.position_table, a.weight, a.weight)
    return tuple(t.new_empty(t.shape) for t in like)


_INPUTS = (
    "Tensor ids, Tensor token_types, Tensor positions, Tensor word_table, Tensor type_table, "
    "Tensor position_table, Tensor weight"
)
_embedding = operator(
    f"embedding({_INPUTS}, Tensor bias, Tensor? seed, float eps, float dropout_p, int padding_idx, "
    "str backend) -> (Tensor, Tensor, Tensor)",
    _fake,
    table="embedding",
)
_embedding_backward = operator(
    f"embedding_backward(Tensor dy, {_INPUTS}, Tensor mean, Tensor rstd, Tensor? seed, "
    "float dropout_p, int padding_idx, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_fake,
    table="embedding",
)


class Inputs(NamedTuple):
    """Three indices (T,), the tables that they index, and the scale (N,) of the norm."""

    ids: Tensor
    token_types: Tensor
    positions: Tensor
    word_table: Tensor
    type_table: Tensor
    position_table: Tensor
    weight: Tensor

    @property
    def indices(self) -> tuple[Tensor, Tensor, Tensor]:
        """The indices of the three tables."""
        return self.ids, self.token_types, self.positions

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three tables."""
        return self.word_table, self.type_table, self.position_table

    def sum(self) -> Tensor:
        """The sum of each token's three rows, (T, N)."""
        word, token_type, position = map(F.embedding, self.indices, self.tables)
        return word + token_type + position


def _setup_context(ctx: Any, a: Any, output: tuple[Tensor, ...]) -> None:
    _, mean, rstd = output
    ctx.dropout_p, ctx.padding_idx, ctx.backend = a.dropout_p, a.padding_idx, a.backend
    inputs = Inputs(*(getattr(a, name) for name in Inputs._fields))
    ctx.save_for_backward(*inputs, mean, rstd, a.seed)
    ctx.mark_non_differentiable(mean, rstd)


def _gradient(ctx: Any, dy: Tensor, *_: Tensor | None) -> dict[str, Tensor]:
    *inputs, mean, rstd, seed = ctx.saved_tensors
    dword, dtype, dposition, dweight, dbias = _embedding_backward(
        dy, *inputs, mean, rstd, seed, ctx.dropout_p, ctx.padding_idx, ctx.backend
    )
    return {
        "word_table": dword,
        "type_table": dtype,
        "position_table": dposition,
        "weight": dweight,
        "bias": dbias,
    }


differentiable("embedding", _gradient, _setup_context)
once_differentiable("embedding_backward")


# Backends


def _reference_forward(*arguments: Any) -> tuple[Tensor, ...]:
    *inputs, bias, seed, eps, dropout_p, _ = arguments
    total, weight = Inputs(*inputs).sum(), inputs[-1]
    y, mean, rstd = closed_form.layer_norm_forward(total, weight, bias, None, None, None, 0.0, eps)
    return reference.dropout(y, dropout_p, seed, tuple(y.shape)), mean, rstd


def _reference_backward(dy: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *given, mean, rstd, seed, dropout_p, padding_idx = arguments
    inputs = Inputs(*given)
    dy = reference.dropout(dy, dropout_p, seed, tuple(dy.shape))
    dsum, _, dweight, dbias, _ = closed_form.layer_norm_backward(
        dy, inputs.sum(), inputs.weight, mean, rstd, None, None, None, 0.0
    )
    gradients = (
        torch.ops.aten.embedding_dense_backward(dsum, index, table.shape[0], skipped, False)
        for index, table, skipped in zip(
            inputs.indices, inputs.tables, (padding_idx, -1, -1), strict=True
        )
    )
    return *gradients, dweight, dbias


def _triton_forward(*arguments: Any) -> tuple[Tensor, ...]:
    from fastbert.kernels.embedding import embedding_forward

    *given, bias, seed, eps, dropout_p, _ = arguments
    inputs = Inputs(*given)
    return embedding_forward(
        inputs.indices, inputs.tables, inputs.weight, bias, seed=seed, dropout_p=dropout_p, eps=eps
    )


def _triton_backward(dy: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    from fastbert.kernels.embedding import embedding_backward

    *given, mean, rstd, seed, dropout_p, padding_idx = arguments
    inputs = Inputs(*given)
    return embedding_backward(
        dy, inputs.indices, inputs.tables, inputs.weight, mean, rstd,
        seed=seed, dropout_p=dropout_p, padding_idx=padding_idx,
    )  # fmt: skip


def _extension_forward(*arguments: Any) -> tuple[Tensor, ...]:
    *operands, _ = arguments  # The row of padding_idx differs from others in its gradient alone.
    return torch.ops.fastbert_C.embedding_forward(*operands)


def _extension_backward(*arguments: Any) -> tuple[Tensor, ...]:
    return torch.ops.fastbert_C.embedding_backward(*arguments)


backends.TABLES["embedding"] = {
    "reference": backends.Implementation(
        _reference_forward, _reference_backward, backends.ALL_DTYPES
    ),
    "triton": backends.Implementation(
        _triton_forward, _triton_backward, refuses=backends.refuse_wide_rows
    ),
    "cpu": backends.Implementation(_extension_forward, _extension_backward),
}
