"""The sizes of one call of attention, and the arguments that all kernels of the call share.

In this package, such a call is named an attention problem.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.kernels.launch import Launch, dense, dropout_arguments
from fastbert.kernels.tiles import (
    Tile,
    attention_tile,
    ceil_div,
    padded_head_dim,
    target_of,
)

# These arguments change from call to call. Without this list, Triton would compile a further kernel
# for a value that is 1, and for a value that is divisible by 16.
UNSPECIALISED = [
    "heads",
    "batches",
    "q_blocks",
    "k_blocks",
    "q_length",
    "k_length",
    "q_rows",
    "k_rows",
    "dropout_threshold",
    "window_left",
    "window_right",
    # These strides depend on the number of rows.
    "stride_lse_batch",
    "stride_lse_head",
]


class Problem(NamedTuple):
    """One call of attention: sizes for the grid, and the arguments that the kernels share.

    Args:
        batches: Number of sequences B.
        heads: Number of heads H.
        max_q: Upper bound of the lengths of the query sequences.
        max_k: Upper bound of the lengths of the key sequences.
        head_dim: Head dim D.
        arguments: The arguments that the kernels share, by name.
    """

    batches: int
    heads: int
    max_q: int
    max_k: int
    head_dim: int
    arguments: dict[str, Any]

    @property
    def has_pairs(self) -> bool:
        """Whether the kernels read a bias, or a mask that differs between queries."""
        arguments = self.arguments
        return arguments["HAS_BIAS"] or (arguments["HAS_MASK"] and not arguments["MASK_ROW"])

    def tile(self, pass_name: str) -> Tile:
        """Return the tile of a pass; `pass_name` is as in `attention_tile`."""
        q = self.arguments["q_ptr"]
        return attention_tile(pass_name, self.head_dim, q.dtype, self.has_pairs, target_of(q))

    def launch(
        self, name: str, kernel: Any, tile: Tile, over_keys: bool = False, **own: Any
    ) -> Launch:
        """Return a launch with one program for each block of queries of each head of each sequence.

        Args:
            name: Name of the launch.
            kernel: The kernel. It gets only the arguments whose names it declares.
            tile: Block sizes and launch options.
            over_keys: Whether there is one program for each block of keys instead of queries.
            own: Arguments of the kernel that are not in `arguments`, by name.
        """
        q_blocks = ceil_div(self.max_q, tile.block_m)
        k_blocks = ceil_div(self.max_k, tile.block_n)
        if self.arguments["IS_VARLEN"]:
            # Each sequence has at least one block, because the programs of the last sequence also
            # set the rows beyond the last sequence to 0.
            q_blocks, k_blocks = max(q_blocks, 1), max(k_blocks, 1)
        available = {
            **self.arguments,
            "q_blocks": q_blocks,
            "k_blocks": k_blocks,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            **own,
        }
        arguments = {key: available[key] for key in kernel.arg_names}
        grid = ((k_blocks if over_keys else q_blocks) * self.heads * self.batches,)
        return Launch(name, kernel, grid, arguments, tile.num_warps, tile.num_stages)


def strides(name: str, x: Tensor | None, is_varlen: bool = False) -> dict[str, int]:
    """Return the stride arguments of q, k, v, out or a gradient; all are 0 if `x` is None.

    Args:
        name: Name of the tensor in the names of the arguments.
        x: Tensor of shape (B, H, L, D), or (T, H, D) with `is_varlen`.
        is_varlen: Whether `x` is packed.
    """
    if x is None:
        batch = head = row = dim = 0
    elif is_varlen:
        batch, (row, head, dim) = 0, x.stride()
    else:
        batch, head, row, dim = x.stride()
    return {
        f"stride_{name}_batch": batch,
        f"stride_{name}_head": head,
        f"stride_{name}_row": row,
        f"stride_{name}_dim": dim,
    }


def pair_strides(name: str, x: Tensor | None) -> dict[str, int]:
    """Return the stride arguments of a mask or bias of shape (B, H, Lq, Lk); all are 0 for None."""
    batch, head, row, key = (0, 0, 0, 0) if x is None else x.stride()
    return {
        f"stride_{name}_batch": batch,
        f"stride_{name}_head": head,
        f"stride_{name}_row": row,
        f"stride_{name}_key": key,
    }


def scaling(dtype: torch.dtype, has_bias: bool, scale: float) -> int:
    """Return the constant SCALING, which selects how kernels compute logits and exponentials.

    0: The products q kᵀ are not scaled; the argument of exp2 contains the scale, which is fastest.
        This form allows no bias. It needs a scale above 0, because otherwise the largest product
        does not give the largest logit.
    1: The products are scaled, and the bias is added, before the softmax.
    2: As 1, and exp has the full precision of fp32.
    """
    if dtype == torch.float32:
        return 2
    return 1 if has_bias or scale <= 0 else 0


def longest(cu_seqlens: Tensor) -> int:
    """Return the length of the longest sequence; on a GPU, the host waits for this number."""
    return int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0


class Numbers(NamedTuple):
    """The numerical arguments of one call of attention.

    Args:
        max_q: Upper bound of the lengths of the query sequences.
        max_k: Upper bound of the lengths of the key sequences.
        dropout_p: Probability with which a weight is dropped.
        scale: Factor of the products q kᵀ.
        left: Number of keys before its own position that a query attends to; -1 means no limit.
        right: Number of keys after its own position that a query attends to; -1 means no limit.
    """

    max_q: int
    max_k: int
    dropout_p: float
    scale: float
    left: int
    right: int


def canonical(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
) -> tuple[tuple[Tensor | None, ...], Numbers]:
    """Return the arguments of `attention_forward` in the form that `problem_of` takes.

    In the result, the mask is viewed as uint8, and the seed is None if there is no dropout.
    """
    if cu_seqlens_q is None:
        max_q, max_k = q.shape[2], k.shape[2]
    else:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        max_q = longest(cu_seqlens_q) if max_seqlen_q is None else max_seqlen_q
        max_k = longest(cu_seqlens_k) if max_seqlen_k is None else max_seqlen_k
    mask = None if mask is None else mask.view(torch.uint8)
    seed = seed if dropout_p > 0.0 else None
    left, right = window
    numbers = Numbers(max_q, max_k, dropout_p, scale, left, 0 if causal else right)
    return (q, k, v, mask, bias, *dense(cu_seqlens_q, cu_seqlens_k), seed), numbers


def describe(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Problem:
    """Return the problem that the arguments of `attention_forward` describe.

    Raises:
        ValueError: As in `attention_forward`, except for `path`, which this function does not take.
    """
    tensors, numbers = canonical(q, k, v, **options)
    return problem_of(*tensors, numbers)


def problem_of(q, k, v, mask, bias, cu_seqlens_q, cu_seqlens_k, seed, numbers: Numbers) -> Problem:
    """Return the problem for the tensors and numbers that `canonical` returns.

    Raises:
        ValueError: As in `describe`.
    """
    max_q, max_k, dropout_p, scale, left, right = numbers
    is_varlen = cu_seqlens_q is not None
    if is_varlen:
        batches, heads, head_dim = cu_seqlens_q.numel() - 1, q.shape[1], q.shape[2]
        q_rows, k_rows = q.shape[0], k.shape[0]
    else:
        batches, heads, head_dim = q.shape[0], q.shape[1], q.shape[3]
        q_rows, k_rows = max_q, max_k
    dropout = dropout_arguments(dropout_p, seed)
    arguments = {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "mask_ptr": mask,
        "bias_ptr": bias,
        "seed_ptr": seed,
        "cu_seqlens_q_ptr": cu_seqlens_q,
        "cu_seqlens_k_ptr": cu_seqlens_k,
        **strides("q", q, is_varlen),
        **strides("k", k, is_varlen),
        **strides("v", v, is_varlen),
        **pair_strides("mask", mask),
        **pair_strides("bias", bias),
        # lse and the other row statistics are fp32 (B, H, Lq), or packed (H, Tq).
        "stride_lse_batch": 0 if is_varlen else heads * q_rows,
        "stride_lse_head": q_rows,
        "heads": heads,
        "batches": batches,
        "q_length": max_q,
        "k_length": max_k,
        "q_rows": q_rows,
        "k_rows": k_rows,
        "scale": float(scale),
        "dropout_threshold": dropout.threshold,
        "dropout_scale": dropout.scale,
        "window_left": left,
        "window_right": right,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded_head_dim(head_dim),
        "IS_VARLEN": is_varlen,
        "HAS_MASK": mask is not None,
        "MASK_ROW": mask is not None and mask.stride(2) == 0,
        "HAS_BIAS": bias is not None,
        "HAS_DROPOUT": dropout.enabled,
        "HAS_LEFT": left >= 0,
        "HAS_RIGHT": right >= 0,
        "SCALING": scaling(q.dtype, bias is not None, scale),
    }
    return Problem(batches, heads, max_q, max_k, head_dim, arguments)


def allocate_rows(like: Tensor, is_varlen: bool) -> Tensor:
    """Allocate the tensor for out, or for the gradient of q, k or v.

    Args:
        like: q, k or v, which gives the shape, dtype and device.
        is_varlen: Whether `like` is packed.

    Returns:
        Uninitialised tensor of shape (B, H, L, D), stored in the order of (B, L, H, D), or packed
        (T, H, D).
    """
    if is_varlen:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    batch, heads, length, head_dim = like.shape
    shape = (batch, length, heads, head_dim)
    return torch.empty(shape, dtype=like.dtype, device=like.device).transpose(1, 2)
