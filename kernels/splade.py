"""Forward of SPLADE's head: the largest logit of each sequence and class, and its logarithm.

The function log(1 + relu(x)) is increasing, and the bias of a class is the same for all tokens. The
forward therefore takes the maximum of the products without the bias, and adds the bias and applies
the function once for each sequence and class. A program computes the logits of one sequence for a
block of classes, one tile of tokens after another, and keeps their maximum. The tiles begin at the
first token of the sequence, so that its result has the same bits in every batch. A tile has classes
as rows and tokens as columns, because the maximum over the columns of a matrix product needs no
exchange between warps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.common import INFINITY, log1p, narrow
from fastbert.kernels.gemm import product_tile
from fastbert.kernels.launch import Launch, dense, run
from fastbert.kernels.tiles import ceil_div, splade_tile


@triton.jit(do_not_specialize=["rows_total", "sequences"])
def _forward_kernel(
    # (T, K) and (V, K); fp32, fp16 or bf16
    hidden_ptr, weight_ptr,
    # (V,), any floating dtype; or None
    bias_ptr,
    # (B + 1,), int32
    cu_seqlens_ptr,
    # (B, V), in the dtype of hidden
    y_ptr,
    # (B, V), fp32 and int32; None unless SAVES
    logits_ptr, rows_ptr,
    stride_hidden_row, stride_hidden_col, stride_weight_row, stride_weight_col,
    rows_total, sequences, classes, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, SAVES: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Write the results of one sequence for BLOCK_M classes, from tiles of BLOCK_N tokens."""
    # Programs with adjacent numbers read the same part of the weight, which stays in the L2 cache.
    sequence = tl.program_id(0) % sequences
    own_classes = tl.program_id(0) // sequences * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = tl.load(cu_seqlens_ptr + sequence)
    end = tl.load(cu_seqlens_ptr + sequence + 1)
    highest = tl.full([BLOCK_M], -INFINITY, tl.float32)
    highest_row = tl.full([BLOCK_M], -1, tl.int32)
    nans = tl.zeros([BLOCK_M], tl.int32)
    for first in range(begin, end, BLOCK_N):
        tokens = first + tl.arange(0, BLOCK_N)
        # [BLOCK_M, BLOCK_N]
        logits = product_tile(
            weight_ptr, hidden_ptr, own_classes, tokens, classes, rows_total, depth,
            stride_weight_row, stride_weight_col, stride_hidden_row, stride_hidden_col,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
        )  # fmt: skip
        inside = (tokens < end)[None, :]
        is_nan = logits != logits
        nans = tl.maximum(nans, tl.max((is_nan & inside).to(tl.int32), axis=1))
        logits = tl.where(inside & (is_nan == 0), logits, -INFINITY)
        highest_here = tl.max(logits, axis=1)
        if SAVES:
            # The first token with the largest logit.
            is_highest = logits == highest_here[:, None]
            row = tl.min(tl.where(is_highest, tokens[None, :], 2147483647), axis=1)
            highest_row = tl.where(highest_here > highest, row, highest_row)
        highest = tl.maximum(highest, highest_here)
    inside = own_classes < classes
    if HAS_BIAS:
        highest += tl.load(bias_ptr + own_classes, mask=inside, other=0.0).to(tl.float32)
    highest = tl.where(nans > 0, float("nan"), highest)
    # A sequence without tokens gives 0.
    highest = tl.where(begin < end, highest, 0.0)
    is_positive = highest > 0.0
    y = log1p(tl.where(is_positive, highest, 0.0))
    # A logit that is NaN is not positive and gives NaN. Other logits that are not positive give 0.
    y = tl.where(is_positive, y, tl.where(highest == highest, 0.0, highest))
    offsets = sequence.to(tl.int64) * classes + own_classes
    tl.store(y_ptr + offsets, narrow(y, y_ptr.dtype.element_ty), mask=inside)
    if SAVES:
        tl.store(logits_ptr + offsets, highest, mask=inside)
        tl.store(rows_ptr + offsets, tl.where(is_positive, highest_row, -1), mask=inside)


def forward_launch(hidden, weight, bias, cu_seqlens, y, logits, rows) -> Launch:
    """Return the launch of `splade_forward`."""
    sequences, (classes, depth) = cu_seqlens.shape[0] - 1, weight.shape
    tile, block_k = splade_tile("forward", hidden.dtype)
    arguments = {
        "hidden_ptr": hidden,
        "weight_ptr": weight,
        "bias_ptr": bias,
        "cu_seqlens_ptr": cu_seqlens,
        "y_ptr": y,
        "logits_ptr": logits,
        "rows_ptr": rows,
        "stride_hidden_row": hidden.stride(0),
        "stride_hidden_col": hidden.stride(1),
        "stride_weight_row": weight.stride(0),
        "stride_weight_col": weight.stride(1),
        "rows_total": hidden.shape[0],
        "sequences": sequences,
        "classes": classes,
        "depth": depth,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": block_k,
        "HAS_BIAS": bias is not None,
        "SAVES": logits is not None,
        "EVEN_K": depth % block_k == 0,
    }
    grid = (sequences * ceil_div(classes, tile.block_m),)
    return Launch(
        "splade_forward", _forward_kernel, grid, arguments, tile.num_warps, tile.num_stages
    )


def splade_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, *, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the maximum of log(1 + relu(hidden Wᵀ + bias)) over the tokens of each sequence.

    Args:
        hidden: Rows (T, K), the packed tokens of B sequences; fp32, fp16 or bf16. All tensors may
            have any strides.
        weight: Projection (V, K) in the dtype of `hidden`, with V >= 1 and K >= 1.
        bias: Bias (V,) in any floating dtype, or None.
        cu_seqlens: Cumulative lengths (B + 1,), int32.
        save: Whether the backward needs `logits` and `rows`, which are otherwise None.

    Returns:
        y: (B, V) in the dtype of `hidden`; 0 for a sequence without tokens.
        logits: fp32 (B, V), the largest logit.
        rows: int32 (B, V), the first row of `hidden` that has this logit, or -1 if no logit is
            greater than 0.
    """
    bias, cu_seqlens = dense(bias, cu_seqlens)
    shape, device = (cu_seqlens.shape[0] - 1, weight.shape[0]), hidden.device
    y = torch.empty(shape, dtype=hidden.dtype, device=device)
    logits = torch.empty(shape, dtype=torch.float32, device=device) if save else None
    rows = torch.empty(shape, dtype=torch.int32, device=device) if save else None
    run(forward_launch, (hidden, weight, bias, cu_seqlens), (y, logits, rows))
    return y, logits, rows
