"""Scores of additive attention in blocks: function, operator, gradient.

The sums of all pairs of a query and a key have the shape (B, Lq, Lk, N). The forward and the
backward compute them block by block and store no block, so that they need the memory of one block
beside their inputs and results. The blocks are plain PyTorch on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastbert.ops.arguments import (
    require,
    require_floating,
    require_same_device,
    require_shape,
)
from fastbert.ops.register import differentiable, once_differentiable, operator

# Largest number of elements of a block. On a CPU, a block stays in the cache; on another device, a
# block takes much longer than the start of a kernel.
CPU_BLOCK = 2**18
OTHER_BLOCK = 2**24


def additive_scores(query: Tensor, keys: Tensor, v: Tensor) -> Tensor:
    """Compute ``vᵀ tanh(query + keys)`` for every pair of a query and a key.

    Args:
        query: Projected queries of shape ``(B, Lq, N)``; any floating dtype.
        keys: Projected keys of shape ``(B, Lk, N)`` in the dtype of `query`.
        v: Weights of the sum over N, of shape ``(N,)``; any floating dtype.

    Returns:
        Tensor of shape ``(B, Lq, Lk)``, fp64 for fp64 inputs and fp32 otherwise.

    Raises:
        ValueError: If a shape, a device, or the dtype of `keys` is not allowed. The message names
            the argument, its value and what is allowed.
        TypeError: If a dtype is not floating.

    Note:
        Bahdanau et al. 2015, appendix A.1.2. The sums are computed in fp32 or fp64.
    """
    for name, tensor in (("query", query), ("keys", keys), ("v", v)):
        require_floating(name, tensor)
    require(query.dim() == 3, "query", f"shape {tuple(query.shape)}", "(B, Lq, N)")
    require(keys.dim() == 3, "keys", f"shape {tuple(keys.shape)}", "(B, Lk, N)")
    require(keys.dtype == query.dtype, "keys", keys.dtype, f"{query.dtype}, as query")
    require_shape("keys", keys, (query.shape[0], keys.shape[1], query.shape[2]))
    require_shape("v", v, (query.shape[2],))
    require_same_device("query", query.device, keys=keys, v=v)
    return _additive_scores(query, keys, v)


# The blocks


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _parts(size: int, step: int) -> Iterator[slice]:
    return (slice(start, start + step) for start in range(0, size, step))


def _blocks(query: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the sequences, the queries and the keys of each block."""
    (batch, rows, width), columns = query.shape, keys.shape[1]
    room = CPU_BLOCK if query.device.type == "cpu" else OTHER_BLOCK
    pairs = max(1, room // max(1, width))
    step_k = max(1, min(columns, pairs))
    step_q = max(1, min(rows, pairs // step_k))
    step_b = max(1, pairs // (step_k * step_q))
    for b in _parts(batch, step_b):
        for i in _parts(rows, step_q):
            for j in _parts(columns, step_k):
                yield b, i, j


def _tanh(query: Tensor, keys: Tensor, b: slice, i: slice, j: slice) -> Tensor:
    """Return the block tanh(query + keys), of shape (b, i, j, N)."""
    return (query[b, i].unsqueeze(2) + keys[b, j].unsqueeze(1)).tanh_()


def _forward(query: Tensor, keys: Tensor, v: Tensor) -> Tensor:
    query, keys = _wide(query), _wide(keys)
    v = v.to(query.dtype)
    scores = query.new_empty(query.shape[0], query.shape[1], keys.shape[1])
    for b, i, j in _blocks(query, keys):
        scores[b, i, j] = _tanh(query, keys, b, i, j) @ v
    return scores


def _backward(
    dscores: Tensor, query: Tensor, keys: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, keys and v, with each block computed again."""
    wide_query, wide_keys = _wide(query), _wide(keys)
    wide_v = v.to(wide_query.dtype)
    dquery, dkeys = torch.zeros_like(wide_query), torch.zeros_like(wide_keys)
    dv = torch.zeros_like(wide_v)
    for b, i, j in _blocks(query, keys):
        block, dblock = _tanh(wide_query, wide_keys, b, i, j), dscores[b, i, j]
        dv += dblock.reshape(-1) @ block.flatten(0, 2)
        slope = block.square_().neg_().add_(1.0)  # The derivative of tanh is 1 - tanh².
        dquery[b, i] += (dblock.unsqueeze(2) @ slope).squeeze(2)
        # A product per key, [b, j, 1, i] · [b, j, i, N], reads the block in place.
        dkeys[b, j] += (dblock.mT.unsqueeze(2) @ slope.transpose(1, 2)).squeeze(2)
    dquery, dkeys = dquery.mul_(wide_v), dkeys.mul_(wide_v)
    return dquery.to(query.dtype), dkeys.to(keys.dtype), dv.to(v.dtype)


# The operator


def _fake(a: Any) -> Tensor:
    dtype = torch.promote_types(a.query.dtype, torch.float32)
    return a.query.new_empty(a.query.shape[0], a.query.shape[1], a.keys.shape[1], dtype=dtype)


def _backward_fake(a: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (a.query, a.keys, a.v))


_additive_scores = operator(
    "additive_scores(Tensor query, Tensor keys, Tensor v) -> Tensor", _fake, forward=_forward
)
_additive_scores_backward = operator(
    "additive_scores_backward(Tensor dscores, Tensor query, Tensor keys, Tensor v) "
    "-> (Tensor, Tensor, Tensor)",
    _backward_fake,
    forward=_backward,
)


def _setup_context(ctx: Any, a: Any, output: Tensor) -> None:
    ctx.save_for_backward(a.query, a.keys, a.v)


def _gradient(ctx: Any, dscores: Tensor) -> dict[str, Tensor]:
    dquery, dkeys, dv = _additive_scores_backward(dscores, *ctx.saved_tensors)
    return {"query": dquery, "keys": dkeys, "v": dv}


differentiable("additive_scores", _gradient, _setup_context)
once_differentiable("additive_scores_backward")
