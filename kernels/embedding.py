"""The embedding of a BERT input, dropout(LN(word + type + position)), and its backward.

The forward gathers and sums the rows of the tables and applies layer norm and dropout in one pass
(Devlin et al. 2019, figure 2). The backward first computes dsum, the gradient of each token's sum,
in one pass. It then sums dsum for each table row, without atomic additions. Each index becomes a
key; the keys number the rows of all tables together. After a sort, equal keys form a run, and the
sum of dsum over a run is the gradient of one table row. Programs sum the runs inside chunks of a
fixed number of sorted keys. A second launch adds the parts of runs that extend over several chunks,
such as the runs of token types and of the token [CLS]. Every sum has a fixed order, so reruns agree
bitwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.common import dot, narrow
from fastbert.kernels.launch import Launch, dense, dropout_arguments, run
from fastbert.kernels.norm_rows import (
    keep_rows,
    layer_norm_gradient,
    layer_norm_statistics,
    load_parameter,
    require_rows,
    row_launch,
    row_offsets,
)
from fastbert.kernels.reduction import sum_planes
from fastbert.kernels.tiles import ceil_div, row_programs, row_tile, run_sum_tile

# A program computes the keys of this many tokens.
KEYS_PER_PROGRAM = 1024

# The indices (ids, token types and positions) and the three tables. A table and its indices are
# absent together.
Indices = tuple[Tensor, Tensor | None, Tensor | None]
Tables = tuple[Tensor, Tensor | None, Tensor | None]


@triton.jit
def _gather(
    index_ptr, table_ptr, rows, cols, inside,
    stride_index, stride_table, rows_total, table_rows,
):  # fmt: skip
    """Return the table rows of tokens, fp32 [BLOCK_M, BLOCK_N]; NaN for an index out of range."""
    pointers = index_ptr + rows.to(tl.int64) * stride_index
    index = tl.load(pointers, mask=rows < rows_total, other=0).to(tl.int64)
    in_table = ((index >= 0) & (index < table_rows))[:, None]
    offsets = index[:, None] * stride_table + cols[None, :]
    values = tl.load(table_ptr + offsets, mask=inside & in_table, other=0.0).to(tl.float32)
    return tl.where(in_table, values, float("nan"))


@triton.jit
def _gathered_sum(
    ids_ptr, types_ptr, positions_ptr, word_table_ptr, type_table_ptr, position_table_ptr,
    rows, cols, inside,
    stride_ids, stride_types, stride_positions, stride_word, stride_type, stride_position,
    rows_total, words, types, positions,
    HAS_TYPES: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Return word + type + position in fp32 [BLOCK_M, BLOCK_N], 0 where `inside` is false."""
    total = _gather(
        ids_ptr, word_table_ptr, rows, cols, inside, stride_ids, stride_word, rows_total, words
    )
    if HAS_TYPES:
        total += _gather(
            types_ptr, type_table_ptr, rows, cols, inside,
            stride_types, stride_type, rows_total, types,
        )  # fmt: skip
    if HAS_POSITIONS:
        total += _gather(
            positions_ptr, position_table_ptr, rows, cols, inside,
            stride_positions, stride_position, rows_total, positions,
        )  # fmt: skip
    return tl.where(inside, total, 0.0)


@triton.jit(do_not_specialize=["rows_total"])
def _forward_kernel(
    # (T,), int32 or int64; types and positions may be None
    ids_ptr, types_ptr, positions_ptr,
    # (rows, N); fp32, fp16 or bf16; None without indices
    word_table_ptr, type_table_ptr, position_table_ptr,
    # (N,), any floating dtype; the bias may be None
    weight_ptr, bias_ptr,
    # (1,), int64; None without dropout
    seed_ptr,
    # (T, N), contiguous, in the dtype of the tables
    y_ptr,
    # (T,), fp32
    mean_ptr, rstd_ptr,
    stride_ids, stride_types, stride_positions, stride_word, stride_type, stride_position,
    rows_total, columns, words, types, positions, eps, dropout_threshold, dropout_scale,
    HAS_TYPES: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * BLOCK_M
    rows, cols, offsets, inside = row_offsets(
        first_row, columns, 1, rows_total, columns, BLOCK_M, BLOCK_N
    )
    total = _gathered_sum(
        ids_ptr, types_ptr, positions_ptr, word_table_ptr, type_table_ptr, position_table_ptr,
        rows, cols, inside,
        stride_ids, stride_types, stride_positions, stride_word, stride_type, stride_position,
        rows_total, words, types, positions, HAS_TYPES, HAS_POSITIONS,
    )  # fmt: skip
    centred, mean, rstd = layer_norm_statistics(total, inside, columns, eps)
    weight = load_parameter(weight_ptr, cols, columns)
    y = centred * rstd[:, None] * weight
    if HAS_BIAS:
        y += load_parameter(bias_ptr, cols, columns)
    if HAS_DROPOUT:
        keep = keep_rows(seed_ptr, rows, dropout_threshold, BLOCK_N)
        y = tl.where(keep, y * dropout_scale, 0.0)
    tl.store(y_ptr + offsets, narrow(y, y_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + rows, mean, mask=rows < rows_total)
    tl.store(rstd_ptr + rows, rstd, mask=rows < rows_total)


@triton.jit(do_not_specialize=["rows_total"])
def _backward_kernel(
    # (T, N), in the dtype of the tables
    dy_ptr,
    # shapes and dtypes as in _forward_kernel
    ids_ptr, types_ptr, positions_ptr, word_table_ptr, type_table_ptr, position_table_ptr,
    weight_ptr, seed_ptr, mean_ptr, rstd_ptr,
    # (T, N), contiguous, in the dtype of the tables
    dsum_ptr,
    # (planes, programs, N), fp32: dweight, and dbias with HAS_BIAS
    partials_ptr,
    stride_dy_row, stride_dy_col,
    stride_ids, stride_types, stride_positions, stride_word, stride_type, stride_position,
    rows_total, columns, words, types, positions, dropout_threshold, dropout_scale,
    HAS_TYPES: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.arange(0, BLOCK_N)
    dweight = tl.zeros([BLOCK_N], tl.float32)
    dbias = tl.zeros([BLOCK_N], tl.float32)
    for first_row in range(program * BLOCK_M, rows_total, programs * BLOCK_M):
        rows, _, offsets, inside = row_offsets(
            first_row, stride_dy_row, stride_dy_col, rows_total, columns, BLOCK_M, BLOCK_N
        )
        dy = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        if HAS_DROPOUT:
            keep = keep_rows(seed_ptr, rows, dropout_threshold, BLOCK_N)
            dy = tl.where(keep, dy * dropout_scale, 0.0)
        total = _gathered_sum(
            ids_ptr, types_ptr, positions_ptr, word_table_ptr, type_table_ptr, position_table_ptr,
            rows, cols, inside,
            stride_ids, stride_types, stride_positions, stride_word, stride_type, stride_position,
            rows_total, words, types, positions, HAS_TYPES, HAS_POSITIONS,
        )  # fmt: skip
        mean = tl.load(mean_ptr + rows, mask=rows < rows_total, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < rows_total, other=0.0)
        weight = load_parameter(weight_ptr, cols, columns)
        dsum, normalised = layer_norm_gradient(dy, total, mean, rstd, weight, inside, columns)
        dweight += tl.sum(dy * normalised, axis=0)
        if HAS_BIAS:
            dbias += tl.sum(dy, axis=0)
        _, _, offsets, _ = row_offsets(first_row, columns, 1, rows_total, columns, BLOCK_M, BLOCK_N)
        tl.store(dsum_ptr + offsets, narrow(dsum, dsum_ptr.dtype.element_ty), mask=inside)
    partials = partials_ptr + program.to(tl.int64) * columns + cols
    tl.store(partials, dweight, mask=cols < columns)
    if HAS_BIAS:
        tl.store(partials + programs.to(tl.int64) * columns, dbias, mask=cols < columns)


@triton.jit
def _store_keys(
    keys_ptr, index_ptr, rows, stride_index, rows_total, limit,
    first_key, table_rows, skipped, no_key,
):  # fmt: skip
    """Store the key first_key + index of each token, and no_key in the other entries up to `limit`.

    The key of an index that equals `skipped` or is out of range is also no_key.
    """
    pointers = index_ptr + rows.to(tl.int64) * stride_index
    index = tl.load(pointers, mask=rows < rows_total, other=-1).to(tl.int64)
    counts = (index >= 0) & (index < table_rows) & (index != skipped)
    key = tl.where(counts, first_key + index, no_key)
    tl.store(keys_ptr + rows, key.to(keys_ptr.dtype.element_ty), mask=rows < limit)


@triton.jit(do_not_specialize=["rows_total", "entries", "padding_idx"])
def _keys_kernel(
    # (T,), int32 or int64; types and positions may be None
    ids_ptr, types_ptr, positions_ptr,
    # (entries,), int32 or int64
    keys_ptr,
    stride_ids, stride_types, stride_positions,
    rows_total, entries, words, types, positions, padding_idx,
    HAS_TYPES: tl.constexpr, HAS_POSITIONS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store the keys of the token types, of the positions and of the words, one after another.

    The remaining entries are set to no_key, which is larger than every key.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    no_key = words + types + positions
    if HAS_TYPES:
        _store_keys(
            keys_ptr, types_ptr, rows, stride_types, rows_total, rows_total,
            words, types, -1, no_key,
        )  # fmt: skip
        keys_ptr += rows_total
        entries -= rows_total
    if HAS_POSITIONS:
        _store_keys(
            keys_ptr, positions_ptr, rows, stride_positions, rows_total, rows_total,
            words + types, positions, -1, no_key,
        )  # fmt: skip
        keys_ptr += rows_total
        entries -= rows_total
    _store_keys(
        keys_ptr, ids_ptr, rows, stride_ids, rows_total, entries,
        0, words, padding_idx, no_key,
    )  # fmt: skip


@triton.jit
def _store_gradients(
    keys, gradients, chosen, cols, dword_ptr, dtype_ptr, dposition_ptr, columns, words, types,
    HAS_TYPES: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Store the `chosen` rows of fp32 gradients [BLOCK_M, BLOCK_N] in the table rows of `keys`."""
    gradients = narrow(gradients, dword_ptr.dtype.element_ty)
    rows = keys.to(tl.int64)[:, None]
    offsets = rows * columns + cols[None, :]
    chosen = chosen[:, None] & (cols < columns)[None, :]
    tl.store(dword_ptr + offsets, gradients, mask=chosen & (rows < words))
    if HAS_TYPES:
        offsets = (rows - words) * columns + cols[None, :]
        is_type = (rows >= words) & (rows < words + types)
        tl.store(dtype_ptr + offsets, gradients, mask=chosen & is_type)
    if HAS_POSITIONS:
        offsets = (rows - words - types) * columns + cols[None, :]
        tl.store(dposition_ptr + offsets, gradients, mask=chosen & (rows >= words + types))


@triton.jit(do_not_specialize=["rows_total"])
def _run_sums_kernel(
    # (T, N), contiguous, in the dtype of the tables
    dsum_ptr,
    # (chunks * BLOCK_M,), sorted keys and their places before the sort
    keys_ptr, order_ptr,
    # (2, chunks, N), fp32
    partials_ptr,
    # the gradients of the tables, contiguous; None without a table
    dword_ptr, dtype_ptr, dposition_ptr,
    rows_total, columns, words, types, positions,
    HAS_TYPES: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum the runs of equal keys inside one chunk of BLOCK_M entries.

    The sum of a run that is wholly inside the chunk is stored in its table row. The part of a run
    that began in an earlier chunk is stored in partials[0, chunk]. The part of a run that begins in
    this chunk and continues in the next chunk is stored in partials[1, chunk].
    """
    column_blocks = tl.cdiv(columns, BLOCK_N)
    chunk = tl.program_id(0) // column_blocks
    chunks = tl.num_programs(0) // column_blocks
    cols = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    entries = chunk * BLOCK_M + tl.arange(0, BLOCK_M)
    keys = tl.load(keys_ptr + entries)
    before = tl.load(keys_ptr + entries - 1, mask=entries > 0, other=-1)
    following = chunk * BLOCK_M + BLOCK_M
    after = tl.load(keys_ptr + following, mask=chunk + 1 < chunks, other=-1)
    row = tl.load(order_ptr + entries)
    row -= tl.where(row >= 2 * rows_total, 2 * rows_total, 0)
    row -= tl.where(row >= rows_total, rows_total, 0)
    is_key = keys < words + types + positions
    offsets = row.to(tl.int64)[:, None] * columns + cols[None, :]
    inside = is_key[:, None] & (cols < columns)[None, :]
    dsum = tl.load(dsum_ptr + offsets, mask=inside, other=0.0)
    # Row i of the product is the sum of dsum over all entries of the chunk that have the key of
    # entry i. 0 and 1 are exact in any dtype.
    same = (keys[:, None] == keys[None, :]).to(tl.float32)
    sums = dot(narrow(same, dsum.dtype), dsum, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
    is_first = entries == chunk * BLOCK_M
    went_on = is_first & (keys == before) & is_key
    starts = (is_first | (keys != before)) & ~went_on & is_key
    goes_on = starts & (keys == after)
    # At most one run continues from the previous chunk, and at most one run continues in the next
    # chunk.
    partials = partials_ptr + chunk.to(tl.int64) * columns + cols
    part = tl.sum(tl.where(went_on[:, None], sums, 0.0), axis=0)
    tl.store(partials, part, mask=cols < columns)
    partials += chunks.to(tl.int64) * columns
    part = tl.sum(tl.where(goes_on[:, None], sums, 0.0), axis=0)
    tl.store(partials, part, mask=cols < columns)
    _store_gradients(
        keys, sums, starts & ~goes_on, cols,
        dword_ptr, dtype_ptr, dposition_ptr, columns, words, types, HAS_TYPES, HAS_POSITIONS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["halvings"])
def _crossing_runs_kernel(
    # shapes and dtypes as in _run_sums_kernel
    keys_ptr, partials_ptr, dword_ptr, dtype_ptr, dposition_ptr,
    columns, words, types, positions, halvings,
    HAS_TYPES: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """If a run begins in this chunk and continues in the next chunk, store the sum of its parts."""
    column_blocks = tl.cdiv(columns, BLOCK_N)
    chunk = tl.program_id(0) // column_blocks
    chunks = tl.num_programs(0) // column_blocks
    cols = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    first = chunk * CHUNK
    before = tl.load(keys_ptr + first - 1, mask=chunk > 0, other=-1)
    last = tl.load(keys_ptr + first + CHUNK - 1)
    after = tl.load(keys_ptr + first + CHUNK, mask=chunk + 1 < chunks, other=-1)
    if (last == after) & (last != before) & (last < words + types + positions):
        # Bisection finds the first chunk that begins with another key.
        start, limit = chunk + 1, chunks
        for _ in range(halvings):
            middle = (start + limit) // 2
            key = tl.load(keys_ptr + middle * CHUNK, mask=middle < chunks, other=-1)
            goes_on = key == last
            start = tl.where(goes_on, middle + 1, start)
            limit = tl.where(goes_on, limit, middle)
        parts = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for part in range(chunk + 1, start, BLOCK_M):
            chosen = part + tl.arange(0, BLOCK_M)
            offsets = chosen.to(tl.int64)[:, None] * columns + cols[None, :]
            inside = (chosen < start)[:, None] & (cols < columns)[None, :]
            parts += tl.load(partials_ptr + offsets, mask=inside, other=0.0)
        offsets = (chunks + chunk).to(tl.int64) * columns + cols
        begun = tl.load(partials_ptr + offsets, mask=cols < columns, other=0.0)
        # [1, BLOCK_N]
        gradient = (begun + tl.sum(parts, axis=0))[None, :]
        keys = tl.zeros([1], tl.int64) + last
        _store_gradients(
            keys, gradient, keys >= 0, cols,
            dword_ptr, dtype_ptr, dposition_ptr, columns, words, types, HAS_TYPES, HAS_POSITIONS,
        )  # fmt: skip


def _sizes(tables) -> dict:
    """Return the numbers of rows of the tables, 0 for an absent table, and the HAS_ flags."""
    words, types, positions = tables
    return {
        "words": words.shape[0],
        "types": 0 if types is None else types.shape[0],
        "positions": 0 if positions is None else positions.shape[0],
        "HAS_TYPES": types is not None,
        "HAS_POSITIONS": positions is not None,
    }


def _stride(tensor) -> int:
    return 0 if tensor is None else tensor.stride(0)


def _indices(indices) -> dict:
    ids, types, positions = indices
    return {
        "ids_ptr": ids,
        "types_ptr": types,
        "positions_ptr": positions,
        "stride_ids": ids.stride(0),
        "stride_types": _stride(types),
        "stride_positions": _stride(positions),
        "rows_total": ids.shape[0],
    }


def _shared_arguments(indices, tables, weight, mean, rstd, seed, dropout_p: float) -> dict:
    word_table, type_table, position_table = tables
    require_rows(word_table=word_table, type_table=type_table, position_table=position_table)
    tile = row_tile(word_table.shape[1])
    dropout = dropout_arguments(dropout_p, seed)
    return {
        **_indices(indices),
        **_sizes(tables),
        "word_table_ptr": word_table,
        "type_table_ptr": type_table,
        "position_table_ptr": position_table,
        "weight_ptr": weight,
        "seed_ptr": seed if dropout.enabled else None,
        "mean_ptr": mean,
        "rstd_ptr": rstd,
        "stride_word": word_table.stride(0),
        "stride_type": _stride(type_table),
        "stride_position": _stride(position_table),
        "columns": word_table.shape[1],
        "dropout_threshold": dropout.threshold,
        "dropout_scale": dropout.scale,
        "HAS_DROPOUT": dropout.enabled,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }


def forward_launch(
    ids, type_ids, positions, word_table, type_table, position_table, weight, bias, seed,
    y, mean, rstd, dropout_p, eps,
) -> Launch:  # fmt: skip
    """Return the launch of `embedding_forward`."""
    indices, tables = (ids, type_ids, positions), (word_table, type_table, position_table)
    tile = row_tile(y.shape[1])
    arguments = {
        **_shared_arguments(indices, tables, weight, mean, rstd, seed, dropout_p),
        "bias_ptr": bias,
        "y_ptr": y,
        "eps": eps,
        "HAS_BIAS": bias is not None,
    }
    grid = (ceil_div(y.shape[0], tile.block_m),)
    return row_launch("embedding_forward", _forward_kernel, grid, arguments, tile.num_warps)


def embedding_forward(
    indices: Indices,
    tables: Tables,
    weight: Tensor,
    bias: Tensor | None,
    *,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dropout(LN(word + type + position)), and the mean and reciprocal std of each row.

    A row with an index out of range is NaN, and no memory outside the tables is read.

    Args:
        indices: Word ids, token types and positions, int32 or int64 (T,) at any stride. Token types
            and positions may be None.
        tables: Tables of the words (V, N), the token types (types, N) and the positions (P, N) in
            one dtype, fp32, fp16 or bf16. Rows have any stride, and the last stride is 1. A table
            is None if its indices are None.
        weight: Scale (N,) in any floating dtype.
        bias: Shift (N,) in any floating dtype, or None.
        seed: Seed of the dropout, int64 (1,); may be None without dropout.
        dropout_p: Probability with which an element is dropped.
        eps: Term that is added to the variance.

    Returns:
        y (T, N), contiguous, in the dtype of the tables; and the mean and the reciprocal standard
        deviation of each row, fp32 (T,).

    Raises:
        ValueError: If N is above 8192, if a last stride is not 1, if `dropout_p` is outside [0, 1],
            or if there is dropout without a seed.
    """
    rows, columns = indices[0].shape[0], tables[0].shape[1]
    y = torch.empty((rows, columns), dtype=tables[0].dtype, device=tables[0].device)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=y.device) for _ in range(2))
    if columns > 0:
        inputs = (*indices, *tables, *dense(weight, bias), seed)
        run(forward_launch, inputs, (y, mean, rstd), dropout_p, eps)
    return y, mean, rstd


def backward_launch(
    dy, ids, type_ids, positions, word_table, type_table, position_table, weight, mean, rstd, seed,
    dsum, partials, has_bias, dropout_p,
) -> Launch:  # fmt: skip
    """Return the launch of `embedding_backward` that computes dsum."""
    indices, tables = (ids, type_ids, positions), (word_table, type_table, position_table)
    arguments = {
        **_shared_arguments(indices, tables, weight, mean, rstd, seed, dropout_p),
        "dy_ptr": dy,
        "dsum_ptr": dsum,
        "partials_ptr": partials,
        "stride_dy_row": dy.stride(0),
        "stride_dy_col": dy.stride(1),
        "HAS_BIAS": has_bias,
    }
    num_warps = row_tile(dsum.shape[1]).num_warps
    grid = (partials.shape[1],)
    return row_launch("embedding_backward", _backward_kernel, grid, arguments, num_warps)


def keys_launch(
    ids, type_ids, positions, word_table, type_table, position_table, keys, padding_idx: int
) -> Launch:
    """Return the launch that writes the keys of all indices."""
    indices, tables = (ids, type_ids, positions), (word_table, type_table, position_table)
    arguments = {
        **_indices(indices),
        **_sizes(tables),
        "keys_ptr": keys,
        "entries": keys.shape[0],
        "padding_idx": padding_idx,
        "BLOCK_M": KEYS_PER_PROGRAM,
    }
    before_words = (_present(indices) - 1) * indices[0].shape[0]
    grid = (ceil_div(keys.shape[0] - before_words, KEYS_PER_PROGRAM),)
    return Launch("embedding_keys", _keys_kernel, grid, arguments, 4, 1)


def table_launches(dsum, keys, order, partials, *gradients) -> list[Launch]:
    """Return the two launches that sum the runs and store the gradients of the tables."""
    columns = dsum.shape[1]
    tile = run_sum_tile(columns, dsum.dtype)
    names = ("dword_ptr", "dtype_ptr", "dposition_ptr")
    arguments = {
        "keys_ptr": keys,
        "partials_ptr": partials,
        **dict(zip(names, gradients, strict=True)),
        **_sizes(gradients),
        "columns": columns,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
    grid = (partials.shape[1] * ceil_div(columns, tile.block_n),)
    first = {**arguments, "dsum_ptr": dsum, "order_ptr": order, "rows_total": dsum.shape[0]}
    second = {**arguments, "CHUNK": tile.block_m, "BLOCK_M": 64}
    second["halvings"] = partials.shape[1].bit_length()
    return [
        Launch("embedding_run_sums", _run_sums_kernel, grid, first, tile.num_warps, 1),
        Launch("embedding_crossing_runs", _crossing_runs_kernel, grid, second, 4, 1),
    ]


def _present(tensors) -> int:
    return sum(tensor is not None for tensor in tensors)


def table_gradients(
    dsum: Tensor, indices: Indices, tables: Tables, padding_idx: int = -1
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the gradients of the tables from `dsum`, which is contiguous (T, N).

    A row of `dsum` that is not finite may make the gradients of the other keys in its chunk of
    sorted keys NaN, because the kernel multiplies the row by 0 for these keys.
    """
    rows, columns = dsum.shape

    def zeros(table: Tensor) -> Tensor:
        return torch.zeros(table.shape, dtype=table.dtype, device=dsum.device)

    words, types, positions = tables
    dtypes = None if types is None else zeros(types)
    gradients = (zeros(words), dtypes, None if positions is None else zeros(positions))
    sizes = _sizes(tables)
    key_count = sizes["words"] + sizes["types"] + sizes["positions"]
    key_dtype = torch.int32 if key_count < 2**31 else torch.int64
    chunk = run_sum_tile(columns, dsum.dtype).block_m
    chunks = ceil_div(_present(indices) * rows, chunk)
    keys = torch.empty(chunks * chunk, dtype=key_dtype, device=dsum.device)
    run(keys_launch, (*indices, *tables), (keys,), padding_idx)
    # The sort is stable, so the order of equal keys is always the same.
    keys, order = torch.sort(keys, stable=True)
    partials = torch.empty((2, chunks, columns), dtype=torch.float32, device=dsum.device)
    run(table_launches, (dsum, keys, order), (partials, *gradients))
    return gradients


def embedding_backward(
    dy: Tensor,
    indices: Indices,
    tables: Tables,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    seed: Tensor | None = None,
    has_bias: bool = True,
    dropout_p: float = 0.0,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """Compute the gradients of `embedding_forward`.

    The arguments that are not listed are those of `embedding_forward`. Sums are fp32 in a fixed
    order, so reruns agree bitwise.

    Args:
        dy: Gradient of y, (T, N) at any strides.
        mean: Mean that the forward returned.
        rstd: Reciprocal standard deviation that the forward returned.
        has_bias: Whether `embedding_forward` was called with a bias.
        padding_idx: Row of the word table whose gradient is exactly 0; -1 means no row.

    Returns:
        The gradients of the three tables, of the weight, and of the bias in the dtype of `weight`.
        The gradient of an absent parameter is None. The gradient of a table row to which no index
        points is exactly 0.
    """
    rows, columns = dy.shape
    dsum = torch.empty((rows, columns), dtype=tables[0].dtype, device=dy.device)
    shape = (1 + has_bias, row_programs(dsum), columns)
    partials = torch.empty(shape, dtype=torch.float32, device=dy.device)
    if columns > 0:
        inputs = (dy, *indices, *tables, *dense(weight, mean, rstd), seed)
        run(backward_launch, inputs, (dsum, partials), has_bias, dropout_p)
    dweight, *rest = sum_planes(partials, *[weight.dtype] * (1 + has_bias))
    dbias = rest[0] if has_bias else None
    return *table_gradients(dsum, indices, tables, padding_idx), dweight, dbias
