"""The embedding of a BERT input: three gathers, their sum, layer norm and dropout in one
operator.
"""

from __future__ import annotations

from typing import Any

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
    """dropout(LN(word[ids] + type[token_types] + position[positions])) (Devlin et al. 2019, figure
    2).

    ids, token_types, positions int64 or int32 of one shape, (T,) or (B, L); tables (V, N), (types,
    N), (P, N) of one floating dtype; weight, bias (N,) in any. The row ``padding_idx`` of
    word_table gets no gradient. Returns (..., N) in the tables' dtype.

    An id out of range raises IndexError on the CPU and is an error of the device on a GPU.
    ``backend="triton"`` reads nothing outside the tables and, as looking would synchronise, makes
    that row NaN. Other errors are ValueError or TypeError and name the argument.
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


# The operator: indices (T,) → y (T, N), mean and rstd (T,)


def _forward(
    ids, types, positions, words, type_table, places, weight, bias, seed, eps, p, padding, backend
):
    forward = backends.TABLES["embedding"][backend].forward
    return forward(ids, types, positions, words, type_table, places, weight, bias, seed, eps, p)


def _fake(ids, types, positions, words, *rest):
    statistics = words.new_empty(
        ids.shape[0], dtype=torch.promote_types(words.dtype, torch.float32)
    )
    y = words.new_empty(ids.shape[0], words.shape[1])
    return y, statistics, torch.empty_like(statistics)


def _backward(dy, *arguments):
    return backends.TABLES["embedding"][arguments[-1]].backward(dy, *arguments[:-1])


def _backward_fake(dy, ids, types, positions, words, type_table, places, weight, *rest):
    return tuple(t.new_empty(t.shape) for t in (words, type_table, places, weight, weight))


_TABLES = (
    "Tensor ids, Tensor token_types, Tensor positions, Tensor word_table, Tensor type_table, "
    "Tensor position_table, Tensor weight"
)
_embedding = operator(
    f"embedding({_TABLES}, Tensor bias, Tensor? seed, float eps, float dropout_p, int padding_idx, "
    "str backend) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake,
)
_embedding_backward = operator(
    f"embedding_backward(Tensor dy, {_TABLES}, Tensor mean, Tensor rstd, Tensor? seed, "
    "float dropout_p, int padding_idx, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, mean, rstd = output
    ctx.save_for_backward(*inputs[:7], mean, rstd, inputs[8])
    ctx.numbers = inputs[10:]
    ctx.mark_non_differentiable(mean, rstd)


def _gradient(ctx: Any, dy: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = _embedding_backward(dy, *ctx.saved_tensors, *ctx.numbers)
    return None, None, None, *gradients, *[None] * 5


differentiable("embedding", _gradient, _setup_context)
once_differentiable("embedding_backward")


# Backends


def _sum(ids, types, positions, words, type_table, places):
    return F.embedding(ids, words) + F.embedding(types, type_table) + F.embedding(positions, places)


def _reference_forward(
    ids, types, positions, words, type_table, places, weight, bias, seed, eps, p
):
    total = _sum(ids, types, positions, words, type_table, places)
    y, mean, rstd = closed_form.layer_norm_forward(total, weight, bias, None, None, None, 0.0, eps)
    return reference.dropout(y, p, seed, tuple(y.shape)), mean, rstd


def _reference_backward(
    dy, ids, types, positions, words, type_table, places, weight, mean, rstd, seed, p, padding
):
    total = _sum(ids, types, positions, words, type_table, places)
    dy = reference.dropout(dy, p, seed, tuple(dy.shape))
    dsum, _, dweight, dbias, _ = closed_form.layer_norm_backward(
        dy, total, weight, mean, rstd, None, None, None, 0.0
    )
    tables = ((ids, words, padding), (types, type_table, -1), (positions, places, -1))
    gradients = (
        torch.ops.aten.embedding_dense_backward(dsum, index, table.shape[0], skip, False)
        for index, table, skip in tables
    )
    return *gradients, dweight, dbias


def _triton_forward(ids, types, positions, words, type_table, places, weight, bias, seed, eps, p):
    from fastbert.kernels.embedding import embedding_forward

    indices, tables = (ids, types, positions), (words, type_table, places)
    return embedding_forward(indices, tables, weight, bias, seed=seed, dropout_p=p, eps=eps)


def _triton_backward(
    dy, ids, types, positions, words, type_table, places, weight, mean, rstd, seed, p, padding
):
    from fastbert.kernels.embedding import embedding_backward

    indices, tables = (ids, types, positions), (words, type_table, places)
    return embedding_backward(
        dy, indices, tables, weight, mean, rstd, seed=seed, dropout_p=p, padding_idx=padding
    )


def _extension_forward(*arguments):
    return torch.ops.fastbert_C.embedding_forward(*arguments)


def _extension_backward(*arguments):
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
