"""SPLADE's weights of a vocabulary, computed without storing the (T, V) logits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import reference
from fastbert.ops import backend as backends
from fastbert.ops.arguments import (
    autocast_dtype,
    check_cu_seqlens,
    require,
    require_floating,
    transformed,
)
from fastbert.ops.product import check_parameters, needs_gradient, parameters_for, rows_of
from fastbert.ops.register import differentiable, once_differentiable, operator


def splade(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor,
    backend: str | None = None,
) -> Tensor:
    """Compute the maximum of ``log(1 + relu(hidden Wᵀ + b))`` over the tokens of each sequence.

    The logits ``hidden Wᵀ + b`` of all tokens are never stored: memory grows with ``B V``, not with
    ``T V``. The gradient of an element reaches the token with the largest logit. If several tokens
    have this logit, the gradient reaches one of them. A logit of 0 or less has no gradient.

    Args:
        hidden: Rows of shape ``(T, K)``, the packed tokens of B sequences.
        weight: Projection to the vocabulary, of shape ``(V, K)`` in the dtype of `hidden`; under
            autocast, in fp32, fp16 or bf16.
        bias: Bias of shape ``(V,)``, or None.
        cu_seqlens: Cumulative lengths of the sequences, starting with 0, int32 of shape
            ``(B + 1,)``. Rows from ``cu_seqlens[-1]`` on belong to no sequence.
        backend: ``"reference"``, ``"triton"`` or ``"cpu"``; None lets
            ``fastbert.ops.backend.resolve`` choose.

    Returns:
        Tensor of shape ``(B, V)`` in the dtype of `hidden`, or in autocast's dtype under autocast.
        A sequence without tokens gives 0. A sequence has the same bits in every batch.

    Raises:
        ValueError: If a shape, a device, a value or the dtype of a parameter is not allowed, or if
            `backend` cannot serve the call. The message names the argument, its value and what is
            allowed.
        TypeError: If the dtype of `hidden` is not floating, or if `cu_seqlens` is not int32.

    Note:
        Formal et al. 2021, "SPLADE v2: Sparse Lexical and Expansion Model for Information
        Retrieval", eq. 6.

    Examples:
        >>> import torch
        >>> from fastbert import ops
        >>> hidden = torch.tensor([[1.0], [3.0], [-2.0]])
        >>> ends = torch.tensor([0, 2, 3], dtype=torch.int32)
        >>> ops.splade(hidden, torch.ones(1, 1), cu_seqlens=ends).expm1().round().tolist()
        [[3.0], [0.0]]
    """
    require_floating("hidden", hidden)
    require(hidden.dim() == 2, "hidden", f"shape {tuple(hidden.shape)}", "(T, K)")
    cast = autocast_dtype(hidden)
    check_parameters(hidden.shape[1], hidden, cast, "weight", weight, "bias", bias)
    check_cu_seqlens("cu_seqlens", cu_seqlens, "hidden", hidden.device, hidden.shape[0])
    dtype = hidden.dtype if cast is None else cast
    request = backends.Request(hidden.device.type, dtype, transformed=transformed())
    choice = backends.resolve("splade", backend, request)
    if request.transformed or 0 in weight.shape:
        # Transforms of torch.func and forward-mode AD need plain PyTorch. A product with K = 0 or
        # V = 0 needs no kernel.
        return reference.splade(hidden, weight, bias, cu_seqlens=cu_seqlens)
    rows = rows_of(hidden, dtype)
    weight, bias = parameters_for(choice.backend, dtype, weight, bias)
    save = needs_gradient(rows, weight, bias)
    y, _, _ = _splade(rows, weight, bias, cu_seqlens, save, choice.backend)
    return y


# The operator returns the result and, with `save`, two tensors (B, V) for the backward: the largest
# logit of each sequence, in fp32 or wider, and in int32 the row of `hidden` that has this logit.
# The row is -1 if no logit is greater than 0. Without `save`, both tensors are empty.


def _logit_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _fake(a: Any) -> tuple[Tensor, ...]:
    shape = (a.cu_seqlens.shape[0] - 1, a.weight.shape[0])
    kept = shape if a.save else (0,)
    logits = a.hidden.new_empty(kept, dtype=_logit_dtype(a.hidden))
    return a.hidden.new_empty(shape), logits, a.hidden.new_empty(kept, dtype=torch.int32)


def _backward_fake(a: Any) -> tuple[Tensor, ...]:
    dbias = a.hidden.new_empty(0) if a.bias is None else a.bias.new_empty(a.bias.shape)
    return a.hidden.new_empty(a.hidden.shape), a.weight.new_empty(a.weight.shape), dbias


_splade = operator(
    "splade(Tensor hidden, Tensor weight, Tensor? bias, Tensor cu_seqlens, bool save, str backend)"
    " -> (Tensor, Tensor, Tensor)",
    _fake,
    table="splade",
)
_splade_backward = operator(
    "splade_backward(Tensor dy, Tensor hidden, Tensor weight, Tensor? bias, Tensor cu_seqlens, "
    "Tensor logits, Tensor rows, str backend) -> (Tensor, Tensor, Tensor)",
    _backward_fake,
    table="splade",
)


def _setup_context(ctx: Any, a: Any, output: tuple[Tensor, ...]) -> None:
    _, logits, rows = output
    ctx.backend = a.backend
    ctx.save_for_backward(a.hidden, a.weight, a.bias, a.cu_seqlens, logits, rows)
    ctx.mark_non_differentiable(logits, rows)


def _gradient(ctx: Any, dy: Tensor, *_: Tensor | None) -> dict[str, Tensor | None]:
    dhidden, dweight, dbias = _splade_backward(dy, *ctx.saved_tensors, ctx.backend)
    return {"hidden": dhidden, "weight": dweight, "bias": dbias}


differentiable("splade", _gradient, _setup_context)
once_differentiable("splade_backward")


# Backends


def _reference_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, save: bool
) -> tuple[Tensor, ...]:
    shape = (cu_seqlens.shape[0] - 1, weight.shape[0])
    logits = hidden.new_zeros(shape, dtype=_logit_dtype(hidden))
    rows = torch.full(shape, -1, dtype=torch.int32, device=hidden.device)
    for i, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        if begin < end:
            highest, row = F.linear(hidden[begin:end], weight, bias).max(dim=0)
            logits[i] = highest
            rows[i] = torch.where(highest > 0, begin + row, -1)
    y = logits.relu().log1p().to(hidden.dtype)
    return (y, logits, rows) if save else (y, logits.new_empty(0), rows.new_empty(0))


def _reference_backward(
    dy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    logits: Tensor,
    rows: Tensor,
) -> tuple[Tensor, ...]:
    # The derivative of log(1 + relu(x)) is 1 / (1 + x) for x > 0, and 0 otherwise.
    dhighest = torch.where(rows >= 0, dy / (1 + logits), 0.0)
    dhidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
    # dweight is a sum over the sequences, computed in the dtype of the logits.
    dweight = torch.zeros_like(weight, dtype=logits.dtype, memory_format=torch.contiguous_format)
    for row, gradient in zip(rows.clamp(min=0).long(), dhighest, strict=True):
        tokens, place = row.unique(return_inverse=True)
        dlogits = gradient.new_zeros(tokens.shape[0], row.shape[0])
        dlogits = dlogits.scatter_(0, place[None], gradient[None]).to(hidden.dtype)
        dhidden.index_add_(0, tokens, dlogits @ weight)
        dweight += dlogits.t() @ hidden[tokens]
    dbias = hidden.new_empty(0) if bias is None else dhighest.sum(dim=0).to(bias.dtype)
    return dhidden, dweight.to(weight.dtype), dbias


def _triton_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, save: bool
) -> tuple[Tensor, ...]:
    from fastbert.kernels.splade import splade_forward

    y, logits, rows = splade_forward(hidden, weight, bias, cu_seqlens, save=save)
    if logits is None or rows is None:
        return y, y.new_empty(0, dtype=torch.float32), y.new_empty(0, dtype=torch.int32)
    return y, logits, rows


def _triton_backward(
    dy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    logits: Tensor,
    rows: Tensor,
) -> tuple[Tensor, ...]:
    from fastbert.kernels.splade_backward import splade_backward

    given = (dy, hidden, weight, bias, cu_seqlens, logits, rows)
    dhidden, dweight, dbias = splade_backward(*given)
    return dhidden, dweight, hidden.new_empty(0) if dbias is None else dbias


def _extension_forward(*arguments: Any) -> tuple[Tensor, ...]:
    return torch.ops.fastbert_C.splade_forward(*arguments)


def _extension_backward(
    dy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    logits: Tensor,
    rows: Tensor,
) -> tuple[Tensor, ...]:
    return torch.ops.fastbert_C.splade_backward(dy, hidden, weight, bias, logits, rows)


backends.TABLES["splade"] = {
    "reference": backends.Implementation(
        _reference_forward, _reference_backward, backends.ALL_DTYPES
    ),
    "triton": backends.Implementation(_triton_forward, _triton_backward),
    "cpu": backends.Implementation(_extension_forward, _extension_backward),
}
