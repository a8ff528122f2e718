"""Functions on tiles of whole rows, shared by layer_norm, rms_norm and embedding."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.common import INFINITY
from fastbert.kernels.launch import Launch
from fastbert.kernels.philox import dropout_keep


@triton.jit
def row_offsets(
    first_row, stride_row, stride_col, rows_total, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the rows, columns, offsets and mask `inside` of the tile that begins at `first_row`.

    The offsets and `inside`, which is true inside the matrix, are [BLOCK_M, BLOCK_N].
    """
    rows = first_row + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    offsets = rows.to(tl.int64)[:, None] * stride_row + cols.to(tl.int64)[None, :] * stride_col
    inside = (rows < rows_total)[:, None] & (cols < columns)[None, :]
    return rows, cols, offsets, inside


@triton.jit
def load_parameter(pointer, cols, columns):
    """Return a weight or a bias in fp32 [1, BLOCK_N], with 0 beyond `columns`."""
    return tl.load(pointer + cols, mask=cols < columns, other=0.0).to(tl.float32)[None, :]


@triton.jit
def keep_rows(seed_ptr, rows, dropout_threshold, BLOCK_N: tl.constexpr):
    """Return a mask of the elements of whole rows that dropout keeps, int1 [BLOCK_M, BLOCK_N]."""
    zero = tl.sum(rows, axis=0) * 0
    return dropout_keep(tl.load(seed_ptr), rows, zero, zero, 0, dropout_threshold, BLOCK_N)


@triton.jit
def load_sum(
    # (R, N); fp32, fp16 or bf16; the residual may be None
    x_ptr, residual_ptr,
    # (N,), any floating dtype; or None
    x_bias_ptr,
    # (1,), int64; None without dropout
    seed_ptr,
    first_row, stride_x_row, stride_residual_row, rows_total, columns,
    dropout_threshold, dropout_scale,
    HAS_RESIDUAL: tl.constexpr, HAS_X_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return residual + dropout(x + x_bias) in fp32, and a mask of the elements that dropout keeps.

    Both results are [BLOCK_M, BLOCK_N]. The sum is 0 outside the matrix. Without dropout, the mask
    is true inside the matrix.
    """
    rows, cols, offsets, inside = row_offsets(
        first_row, stride_x_row, 1, rows_total, columns, BLOCK_M, BLOCK_N
    )
    total = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    keep = inside
    if HAS_X_BIAS:
        total += load_parameter(x_bias_ptr, cols, columns)
    if HAS_DROPOUT:
        keep = keep_rows(seed_ptr, rows, dropout_threshold, BLOCK_N)
        total = tl.where(keep, total * dropout_scale, 0.0)
    if HAS_RESIDUAL:
        _, _, offsets, _ = row_offsets(
            first_row, stride_residual_row, 1, rows_total, columns, BLOCK_M, BLOCK_N
        )
        total += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, total, 0.0), keep


@triton.jit
def row_mean(x, columns):
    """Return the mean of each row of x [BLOCK_M, BLOCK_N], which must be 0 outside the matrix.

    The operator ``/`` has an error of 2 ulp, which one step of Newton's method corrects.
    ``tl.div_rn`` rounds correctly, but calls a subroutine, for which the widest rows leave no
    registers.
    """
    total = tl.sum(x, axis=1)
    count = tl.full(total.shape, columns, tl.float32)
    inverse = 1.0 / count
    mean = total * inverse
    # If x holds squares that overflow, the mean is infinite. The step of Newton's method would then
    # give NaN.
    return tl.where(
        tl.abs(mean) < INFINITY, tl.fma(tl.fma(-mean, count, total), inverse, mean), mean
    )


@triton.jit
def reciprocal_root(x):
    """Return 1 / sqrt(x) with both operations rounded to nearest, unlike ``tl.sqrt`` and ``/``."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), tl.sqrt_rn(x))


@triton.jit
def layer_norm_statistics(total, inside, columns, eps):
    """Return total - mean, the mean, and 1 / sqrt(variance + eps) of each row.

    `total` must be 0 where `inside` is false.
    """
    # The mean of a long row whose values are far from 0 has a rounding error. The mean of the
    # differences from the mean corrects this error.
    mean = row_mean(total, columns)
    centred = tl.where(inside, total - mean[:, None], 0.0)
    correction = row_mean(centred, columns)
    centred = tl.where(inside, centred - correction[:, None], 0.0)
    variance = row_mean(centred * centred, columns)
    return centred, mean + correction, reciprocal_root(variance + eps)


@triton.jit
def layer_norm_gradient(dy, total, mean, rstd, weight, inside, columns):
    """Return the gradient of the sum `total`, and the normalised sum.

    Both results are [BLOCK_M, BLOCK_N]. dy and weight must be 0 outside the matrix, where the
    results are 0 too.
    """
    # As in the forward, the mean of the differences from the mean is subtracted too, which corrects
    # the rounding error of the mean.
    centred = tl.where(inside, total - mean[:, None], 0.0)
    correction = row_mean(centred, columns)
    normalised = tl.where(inside, (centred - correction[:, None]) * rstd[:, None], 0.0)
    dnormalised = dy * weight
    along = row_mean(dnormalised * normalised, columns)
    average = row_mean(dnormalised, columns)
    dsum = dnormalised - average[:, None] - normalised * along[:, None]
    return tl.where(inside, dsum * rstd[:, None], 0.0), normalised


def row_launch(
    name: str, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], num_warps: int
) -> Launch:
    """Return the launch of a kernel on whole rows, compiled without fusing products with sums.

    In layer norm, the gradient of a row with one column is ``dy * weight - average``, which is
    exactly 0 only if the product is rounded first. In a sum across lanes, a fused product would
    also give different lanes different sums of the same elements. Memory bandwidth limits the
    kernels, so the additional instructions take no additional time.
    """
    return Launch(name, kernel, grid, arguments, num_warps, num_stages=1, fp_fusion=False)


def require_rows(**tensors: Tensor | None) -> None:
    """Raise ValueError for the first tensor with several columns whose last stride is not 1."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: got last stride {tensor.stride(-1)}, allowed: 1")
