"""Functions that remove the padding rows of a batch and put them back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import reference
from fastbert.ops import backend as backends
from fastbert.ops.arguments import require, require_same_device, require_shape
from fastbert.ops.register import differentiable, operator
from fastbert.reference import Packed, longest, sequence_positions

__all__ = [
    "Packed",
    "any_outside",
    "gather_rows",
    "longest",
    "pad",
    "sequence_positions",
    "tokens_first",
    "unpad",
    "unpad_indices",
]

# The dtypes of ids and masks that the kernels of the extension read.
INTEGERS = (torch.int64, torch.int32, torch.bool)


def unpad(x: Tensor, mask: Tensor) -> Packed:
    """Take the padding out of a batch.

    On a GPU, one copy to the host reads the number of tokens and the longest length. The copy
    synchronises, so call this function once per batch.

    Args:
        x: Tensor of shape ``(B, L, ...)``.
        mask: Bool or 0/1 tensor of shape ``(B, L)``, True or 1 where a row is kept.

    Returns:
        ``Packed`` with the rows that are kept, in batch order; differentiable in `x`.

    Raises:
        ValueError: If a shape or a device is not allowed.

    Examples:
        >>> import torch
        >>> from fastbert import ops
        >>> mask = torch.tensor([[True, True, False], [True, False, False]])
        >>> packed = ops.unpad(torch.arange(6.0).view(2, 3), mask)
        >>> packed.values.tolist(), packed.cu_seqlens.tolist()
        ([0.0, 1.0, 3.0], [0, 2, 3])
        >>> ops.pad(packed).tolist()
        [[0.0, 1.0, 0.0], [3.0, 0.0, 0.0]]
    """
    require(x.dim() >= 2, "x", f"shape {tuple(x.shape)}", "(B, L, ...)")
    require_shape("mask", mask, tuple(x.shape[:2]))
    require_same_device("x", x.device, mask=mask)
    indices, cu_seqlens, longest = unpad_indices(mask)
    values = gather_rows(x.flatten(0, 1), indices)
    return Packed(values, indices, cu_seqlens, longest, mask.shape[0], mask.shape[1])


def unpad_indices(mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the indices of the rows that `mask` keeps, and the lengths of the sequences.

    Args:
        mask: As in `unpad`.

    Returns:
        Indices of the rows in the flattened batch, int64 of shape ``(T,)``; cumulative lengths,
        int32 of shape ``(B + 1,)``; and the length of the longest sequence.
    """
    if not torch.compiler.is_compiling() and _by_extension(mask):
        return torch.ops.fastbert_C.unpad_indices(mask)
    return _unpad_indices(mask)


def any_outside(index: Tensor, size: int, ignored: int | None = None) -> bool:
    """Tell whether `index`, on the CPU, has an element outside [0, size) other than `ignored`."""
    if _by_extension(index):
        return torch.ops.fastbert_C.any_outside(index, size, ignored)
    wrong = (index < 0) | (index >= size)
    if ignored is not None:
        wrong &= index != ignored
    return bool(wrong.any())


def _by_extension(index: Tensor) -> bool:
    """Tell whether fastbert._C can read `index`, in one pass where torch needs several."""
    here = backends.EXTENSION is not None and index.device.type == "cpu"
    return here and index.dtype in INTEGERS and type(index) is Tensor


def pad(packed: Packed) -> Tensor:
    """Put the padding back into a batch.

    Args:
        packed: A batch without padding, as `unpad` returns it.

    Returns:
        Tensor of shape ``(B, L, ...)``, exactly 0 at padding; differentiable in the packed values.
    """
    rows = packed.batch * packed.length
    flat = _scatter_rows(packed.values, packed.indices, rows)
    return flat.view(packed.batch, packed.length, *packed.values.shape[1:])


# The operators


def _unpad_indices_forward(mask: Tensor) -> tuple[Tensor, Tensor, int]:
    if _by_extension(mask):
        return torch.ops.fastbert_C.unpad_indices(mask)
    if mask.numel() == 0 or (mask.device.type == "cpu" and not _by_kernel(mask)):
        packed = reference.unpad(mask, mask)
        return packed.indices, packed.cu_seqlens, packed.max_seqlen
    if not _by_kernel(mask):
        return _unpad_indices_of_device(mask.bool())
    places = mask if mask.dtype in INTEGERS else mask.bool()
    indices, _, cu_seqlens, totals = torch.ops.fastbert_C.mask_places(places, False)
    rows, longest = totals.tolist()
    return indices[:rows], cu_seqlens, longest


def _by_kernel(mask: Tensor) -> bool:
    """Tell whether a CUDA C++ kernel can compute the indices of the tokens of a mask."""
    return backends.unavailable("cuda", mask.device.type) is None


def tokens_first(exists: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Order the rows of a padded batch: the rows of tokens first, then the rows of padding.

    Nothing is read from the device, so that a CUDA graph can capture the call.

    Args:
        exists: Bool mask of shape ``(B, L)``, True at tokens and False at padding.

    Returns:
        Three tensors. The first has for each row of the ordered batch its index in the flattened
        batch, int64 of shape ``(B · L,)``. The second has for each index in the flattened batch its
        row in the ordered batch, in the same shape and dtype. The third has the cumulative lengths,
        int32 of shape ``(B + 1,)``.
    """
    if exists.numel() and _by_kernel(exists):
        places, rows, cu_seqlens, _ = torch.ops.fastbert_C.mask_places(exists, True)
        return places, rows, cu_seqlens
    flat = exists.flatten()
    lengths = exists.sum(1, dtype=torch.int32)
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = torch.where(flat, flat.cumsum(0), flat.sum() + (~flat).cumsum(0)) - 1
    places = torch.arange(rows.shape[0], device=rows.device)
    return torch.empty_like(rows).scatter_(0, rows, places), rows, cu_seqlens


def _unpad_indices_of_device(keep: Tensor) -> tuple[Tensor, Tensor, int]:
    """Compute the results of `unpad_indices` with one read from the device.

    This read gets the number of tokens and the longest length. ``nonzero`` would read the number of
    tokens a second time.
    """
    lengths = keep.sum(dim=1, dtype=torch.int32)
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows, longest = torch.stack([cu_seqlens[-1], lengths.max()]).tolist()
    # Token i is at the first index at which the count of tokens reaches i + 1.
    counts = keep.flatten().cumsum(0)
    wanted = torch.arange(1, rows + 1, device=keep.device)
    return torch.searchsorted(counts, wanted), cu_seqlens, longest


def _unpad_indices_fake(a: Any) -> tuple[Tensor, Tensor, Any]:
    context = torch.library.get_ctx()
    indices = a.mask.new_empty(context.new_dynamic_size(), dtype=torch.int64)
    cu_seqlens = a.mask.new_empty(a.mask.shape[0] + 1, dtype=torch.int32)
    return indices, cu_seqlens, context.new_dynamic_size()


def _gather_forward(x: Tensor, indices: Tensor) -> Tensor:
    return x.index_select(0, indices)


def _gather_fake(a: Any) -> Tensor:
    return a.x.new_empty(a.indices.shape[0], *a.x.shape[1:])


def _scatter_forward(values: Tensor, indices: Tensor, rows: int) -> Tensor:
    if backends.EXTENSION is not None and values.device.type == "cpu":
        return torch.ops.fastbert_C.scatter_rows(values, indices, rows)
    return values.new_zeros(rows, *values.shape[1:]).index_copy_(0, indices, values)


def _scatter_fake(a: Any) -> Tensor:
    return a.values.new_empty(a.rows, *a.values.shape[1:])


_unpad_indices = operator(
    "unpad_indices(Tensor mask) -> (Tensor, Tensor, SymInt)",
    _unpad_indices_fake,
    forward=_unpad_indices_forward,
)
# The indices, int64 of shape (N,), are distinct. Each of the operators `gather_rows` and
# `_scatter_rows` is therefore the gradient of the other, and neither sums rows.
gather_rows = operator(
    "gather_rows(Tensor x, Tensor indices) -> Tensor", _gather_fake, forward=_gather_forward
)
_scatter_rows = operator(
    "scatter_rows(Tensor values, Tensor indices, SymInt rows) -> Tensor",
    _scatter_fake,
    forward=_scatter_forward,
)


def _gather_setup_context(ctx: Any, a: Any, output: Tensor) -> None:
    ctx.save_for_backward(a.indices)
    ctx.rows = a.x.shape[0]


def _gather_gradient(ctx: Any, dvalues: Tensor) -> dict[str, Tensor]:
    (indices,) = ctx.saved_tensors
    return {"x": _scatter_rows(dvalues, indices, ctx.rows)}


def _scatter_setup_context(ctx: Any, a: Any, output: Tensor) -> None:
    ctx.save_for_backward(a.indices)


def _scatter_gradient(ctx: Any, dx: Tensor) -> dict[str, Tensor]:
    (indices,) = ctx.saved_tensors
    return {"values": gather_rows(dx, indices)}


differentiable("gather_rows", _gather_gradient, _gather_setup_context)
differentiable("scatter_rows", _scatter_gradient, _scatter_setup_context)
