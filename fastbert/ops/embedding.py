"""The embedding of a BERT input: look-ups, their sum, layer norm and dropout in one pass."""

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
    require_eps,
    require_floating,
    require_integer,
    require_same_device,
    require_shape,
)
from fastbert.ops.register import differentiable, once_differentiable, operator, or_empty


def embedding(
    ids: Tensor,
    token_types: Tensor | None,
    positions: Tensor | None,
    word_table: Tensor,
    type_table: Tensor | None,
    position_table: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float = 1e-12,
    dropout_p: float = 0.0,
    padding_idx: int | None = None,
    backend: str | None = None,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """Look up and sum the embeddings of each token, normalize the sum, and apply dropout.

    The result is ``dropout(LN(word[ids] + type[token_types] + position[positions]))``. A table that
    is None adds nothing; the indices of an absent table must be None too.

    Args:
        ids: Token ids, int64 or int32 of shape ``(T,)`` or ``(B, L)``.
        token_types: Token type ids of the shape of `ids`, or None.
        positions: Positions of the shape of `ids`, or None.
        word_table: Word embeddings of shape ``(V, N)``, in a floating dtype.
        type_table: Token type embeddings of shape ``(types, N)`` in the dtype of `word_table`, or
            None.
        position_table: Position embeddings of shape ``(P, N)`` in the dtype of `word_table`, or
            None.
        weight: Scale of the layer norm, of shape ``(N,)``, in any floating dtype.
        bias: Shift of the layer norm, of shape ``(N,)``, in any floating dtype, or None.
        eps: Term that is added to the variance.
        dropout_p: Probability with which an element is dropped.
        padding_idx: Row of `word_table` that gets no gradient, or None.
        backend: ``"reference"``, ``"triton"`` or ``"cpu"``; None lets
            ``fastbert.ops.backend.resolve`` choose.
        dropout_seed: Seed of the dropout mask, int64 of shape ``(1,)``; None draws a seed from
            torch's generator of the device. The same seed gives the same mask on every backend.

    Returns:
        Tensor of shape ``(T, N)`` or ``(B, L, N)`` in the dtype of the tables.

    Raises:
        IndexError: If an id is out of range on the CPU. On a GPU, the backend ``"triton"`` sets the
            row of the result to NaN, because a check would synchronise, and the backend
            ``"reference"`` causes a CUDA error.
        ValueError: If a shape, a device or a value is not allowed, or if `backend` cannot serve the
            call. Also if the dtype of a table differs from that of `word_table`, or if only one of
            a table and its indices is None.
        TypeError: If a table is not floating, if indices are not int64 or int32, or if
            `dropout_seed` is not int64.

    Note:
        Devlin et al. 2019, figure 2.
    """
    _require_pair("token_types", token_types, "type_table", type_table)
    _require_pair("positions", positions, "position_table", position_table)
    for name, index in (("ids", ids), ("token_types", token_types), ("positions", positions)):
        if index is not None:
            require_integer(name, index)
            require_shape(name, index, tuple(ids.shape))
    columns = word_table.shape[-1]
    for name, table in (
        ("word_table", word_table),
        ("type_table", type_table),
        ("position_table", position_table),
    ):
        if table is not None:
            require_floating(name, table)
            got = f"shape {tuple(table.shape)}"
            require(table.dim() == 2 and table.shape[1] == columns, name, got, f"(rows, {columns})")
            allowed = f"{word_table.dtype}, as word_table"
            require(table.dtype == word_table.dtype, name, table.dtype, allowed)
    require_shape("weight", weight, (columns,))
    if bias is not None:
        require_shape("bias", bias, (columns,))
    require_same_device(
        "word_table", word_table.device, ids=ids, token_types=token_types, positions=positions,
        type_table=type_table, position_table=position_table, weight=weight, bias=bias,
    )  # fmt: skip
    require_eps(eps)
    seed = draw_seed(dropout_p, dropout_seed, word_table.device)
    request = backends.Request(word_table.device.type, word_table.dtype, columns=columns)
    choice = backends.resolve("embedding", backend, request)
    indices = (None if i is None else i.reshape(-1) for i in (ids, token_types, positions))
    given = (word_table, type_table, position_table)
    tables = (None if table is None else flatten_rows(table) for table in given)
    padding = -1 if padding_idx is None else padding_idx
    y, _, _ = _embedding(
        *indices, *tables, weight, bias, seed, eps, dropout_p, padding, choice.backend
    )
    return y.view(*ids.shape, columns)


def _require_pair(index_name: str, index: Tensor | None, name: str, table: Tensor | None) -> None:
    """Raise ValueError if only one of a table and its indices is None."""
    both = "both or neither"
    require(index is not None or table is None, index_name, f"None with {name}", both)
    require(table is not None or index is None, name, f"None with {index_name}", both)


# The operator takes indices (T,) and returns y (T, N), and the mean and the reciprocal standard
# deviation of each row, (T,). A padding_idx of -1 means None.


def _fake(a: Any) -> tuple[Tensor, ...]:
    words = a.word_table
    y = words.new_empty(a.ids.shape[0], words.shape[1])
    mean = words.new_empty(a.ids.shape[0], dtype=torch.promote_types(words.dtype, torch.float32))
    return y, mean, torch.empty_like(mean)


def _backward_fake(a: Any) -> tuple[Tensor, ...]:
    tables = (a.word_table, a.type_table, a.position_table)
    shapes = ((0,) if table is None else table.shape for table in tables)
    dweight = a.weight.new_empty(a.weight.shape)
    dbias = a.weight.new_empty(a.weight.shape if a.has_bias else (0,))
    return *(a.word_table.new_empty(shape) for shape in shapes), dweight, dbias


_INPUTS = (
    "Tensor ids, Tensor? token_types, Tensor? positions, Tensor word_table, Tensor? type_table, "
    "Tensor? position_table, Tensor weight"
)
_embedding = operator(
    f"embedding({_INPUTS}, Tensor? bias, Tensor? seed, float eps, float dropout_p, "
    "int padding_idx, str backend) -> (Tensor, Tensor, Tensor)",
    _fake,
    table="embedding",
)
# The results are the gradients of the tables, of weight and of bias. The gradient of an absent
# parameter is empty.
_embedding_backward = operator(
    f"embedding_backward(Tensor dy, {_INPUTS}, Tensor mean, Tensor rstd, Tensor? seed, "
    "bool has_bias, float dropout_p, int padding_idx, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_fake,
    table="embedding",
)


class Inputs(NamedTuple):
    """The indices (T,) of a call, the tables, and the scale (N,) of the layer norm.

    `token_types` and `type_table` may be None together, and so may `positions` and
    `position_table`.
    """

    ids: Tensor
    token_types: Tensor | None
    positions: Tensor | None
    word_table: Tensor
    type_table: Tensor | None
    position_table: Tensor | None
    weight: Tensor

    @property
    def indices(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The indices into the three tables."""
        return self.ids, self.token_types, self.positions

    @property
    def tables(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The three tables."""
        return self.word_table, self.type_table, self.position_table

    def sum(self) -> Tensor:
        """Return for each token the sum of its rows in the tables, of shape (T, N)."""
        total = F.embedding(self.ids, self.word_table)
        for index, table in zip(self.indices[1:], self.tables[1:], strict=True):
            if index is not None and table is not None:
                total = total + F.embedding(index, table)
        return total


def _setup_context(ctx: Any, a: Any, output: tuple[Tensor, ...]) -> None:
    _, mean, rstd = output
    ctx.dropout_p, ctx.padding_idx, ctx.backend = a.dropout_p, a.padding_idx, a.backend
    ctx.has_bias = a.bias is not None
    inputs = Inputs(*(getattr(a, name) for name in Inputs._fields))
    ctx.save_for_backward(*inputs, mean, rstd, a.seed)
    ctx.mark_non_differentiable(mean, rstd)


def _gradient(ctx: Any, dy: Tensor, *_: Tensor | None) -> dict[str, Tensor | None]:
    *inputs, mean, rstd, seed = ctx.saved_tensors
    dword, dtype, dposition, dweight, dbias = _embedding_backward(
        dy, *inputs, mean, rstd, seed, ctx.has_bias, ctx.dropout_p, ctx.padding_idx, ctx.backend
    )
    given = Inputs(*inputs)
    return {
        "word_table": dword,
        "type_table": None if given.type_table is None else dtype,
        "position_table": None if given.position_table is None else dposition,
        "weight": dweight,
        "bias": dbias if ctx.has_bias else None,
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
    *given, mean, rstd, seed, has_bias, dropout_p, padding_idx = arguments
    inputs = Inputs(*given)
    dy = reference.dropout(dy, dropout_p, seed, tuple(dy.shape))
    dsum, _, dweight, dbias, _ = closed_form.layer_norm_backward(
        dy, inputs.sum(), inputs.weight, mean, rstd, None, None, None, has_bias, 0.0
    )

    def gradient(index: Tensor | None, table: Tensor | None, skipped: int = -1) -> Tensor:
        if index is None or table is None:
            return dsum.new_empty(0)
        rows = table.shape[0]
        return torch.ops.aten.embedding_dense_backward(dsum, index, rows, skipped, False)

    dword = gradient(inputs.ids, inputs.word_table, padding_idx)
    dtype = gradient(inputs.token_types, inputs.type_table)
    dposition = gradient(inputs.positions, inputs.position_table)
    return dword, dtype, dposition, dweight, dbias


def _triton_forward(*arguments: Any) -> tuple[Tensor, ...]:
    from fastbert.kernels.embedding import embedding_forward

    *given, bias, seed, eps, dropout_p, _ = arguments
    inputs = Inputs(*given)
    return embedding_forward(
        inputs.indices, inputs.tables, inputs.weight, bias, seed=seed, dropout_p=dropout_p, eps=eps
    )


def _triton_backward(dy: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    from fastbert.kernels.embedding import embedding_backward

    *given, mean, rstd, seed, has_bias, dropout_p, padding_idx = arguments
    inputs = Inputs(*given)
    *tables, dweight, dbias = embedding_backward(
        dy, inputs.indices, inputs.tables, inputs.weight, mean, rstd,
        seed=seed, has_bias=has_bias, dropout_p=dropout_p, padding_idx=padding_idx,
    )  # fmt: skip
    return *or_empty(dy, *tables), *or_empty(dweight, dweight, dbias)


def _extension_forward(*arguments: Any) -> tuple[Tensor, ...]:
    *operands, _ = arguments  # padding_idx changes the gradient only.
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
