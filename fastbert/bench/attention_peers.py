"""Other attention kernels, to be timed beside ours: each prepared for one set of inputs.

A peer gets the arguments of ``fastbert.ops.attention`` or ``attention_varlen`` as ``Inputs`` and
returns a ``Prepared``. What it does not serve it refuses by raising, and the benchmark writes the
reason down. Layout changes that a caller would make once per batch are made outside the timed part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastbert.testing.cases import Inputs


class Prepared(NamedTuple):
    """One engine on one set of inputs.

    run: the forward pass. targets: the leaves whose gradients the operation's own would be.
    restore: from this engine's layout of the output and of the gradients to the operation's own.
    backward: takes the place of autograd where set: gradients of the targets from the output's.
    """

    run: Callable[[], Tensor]
    targets: list[Tensor]
    restore: Callable[[Tensor], Tensor] = lambda x: x
    backward: Callable[[Tensor], Any] | None = None


def leaves(inputs: Inputs) -> Inputs:
    """The same inputs, detached; those that want gradients are leaves."""
    return inputs.map(
        lambda name, v: (
            v.detach().requires_grad_(name in inputs.gradients) if isinstance(v, Tensor) else v
        )
    )


def of_function(function: Callable[..., Tensor], inputs: Inputs, **extra: Any) -> Prepared:
    """``function`` on the operation's own arguments."""
    ready = leaves(inputs)
    named = dict(ready.items())
    return Prepared(
        lambda: function(*ready.positional.values(), **ready.keyword, **extra),
        [named[name] for name in inputs.gradients],
    )


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / √D) v, spelled out. q, k, v (B, H, L, D)."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
    return scores.softmax(-1) @ v


# Dense: q, k, v (B, H, L, D), keyword mask (B, Lk) and dropout_p


def _dense_mask(inputs: Inputs) -> Tensor | None:
    mask = inputs.keyword.get("mask")
    return None if mask is None else mask[:, None, None, :]


def sdpa(kernel: SDPBackend, inputs: Inputs) -> Prepared:
    """``scaled_dot_product_attention`` with one kernel allowed; it raises where that refuses."""
    ready = leaves(inputs)
    q, k, v = ready.positional.values()
    mask, dropout_p = _dense_mask(ready), ready.keyword.get("dropout_p", 0.0)

    def run() -> Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, mask, dropout_p)

    return Prepared(run, [q, k, v])


def plain(compile_with: Callable[..., Any] | None, inputs: Inputs) -> Prepared:
    """The formula in eager PyTorch, or compiled."""
    if inputs.keyword.get("dropout_p"):
        raise ValueError("dropout_p: timed without dropout only")
    ready = leaves(inputs)
    q, k, v = ready.positional.values()
    mask = ready.keyword.get("mask")
    function = compile_with(eager) if compile_with else eager
    return Prepared(lambda: function(q, k, v, mask), [q, k, v])


def flex(compile_with: Callable[..., Any] | None, inputs: Inputs) -> Prepared:
    """FlexAttention; key padding as a block mask, which skips whole blocks of padding."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if inputs.keyword.get("dropout_p"):
        raise ValueError("dropout_p: FlexAttention has no dropout")
    ready = leaves(inputs)
    q, k, v = ready.positional.values()
    mask, block_mask = ready.keyword.get("mask"), None
    if mask is not None:
        lengths = mask.sum(-1)

        def is_key(batch, head, row, key):
            return key < lengths[batch]

        sizes = (q.shape[0], None, q.shape[2], k.shape[2])
        block_mask = create_block_mask(is_key, *sizes, device=q.device.type)
    function = compile_with(flex_attention) if compile_with else flex_attention
    return Prepared(lambda: function(q, k, v, block_mask=block_mask), [q, k, v])


def flash_package(inputs: Inputs) -> Prepared:
    """The flash-attn package, where it is installed."""
    from flash_attn import flash_attn_func

    if inputs.keyword.get("mask") is not None:
        raise ValueError("mask: flash_attn_func has none")
    dropout_p = inputs.keyword.get("dropout_p", 0.0)
    ready = leaves(inputs)
    q, k, v = ready.positional.values()

    def run() -> Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_func(*rows, dropout_p=dropout_p).transpose(1, 2)

    return Prepared(run, [q, k, v])


# Packed: q, k, v (T, H, D), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k


def varlen(inputs: Inputs) -> Prepared:
    """``torch.nn.attention.varlen``, whose seven positional arguments all versions share."""
    from torch.nn.attention.varlen import varlen_attn

    if inputs.keyword.get("dropout_p"):
        raise ValueError("dropout_p: varlen_attn has no dropout")
    return of_function(varlen_attn, Inputs(inputs.positional, {}, inputs.gradients))


def flash_varlen_package(inputs: Inputs) -> Prepared:
    """The flash-attn package's varlen function, where it is installed."""
    from flash_attn import flash_attn_varlen_func

    return of_function(flash_attn_varlen_func, Inputs(inputs.positional, {}, inputs.gradients))


def padded(kernel: SDPBackend, inputs: Inputs) -> Prepared:
    """The padded batch in SDPA, under a key mask unless all lengths are the same."""
    rows, mask = _padding(inputs)
    ready = [
        F.pad(x.detach(), (0, 0, 0, 0, 0, 1))[rows]
        .transpose(1, 2)
        .requires_grad_(bool(inputs.gradients))
        for x in list(inputs.positional.values())[:3]
    ]
    attn_mask = None if bool(mask.all()) else mask[:, None, None, :]

    def run() -> Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(*ready, attn_mask=attn_mask)

    return Prepared(run, ready, restore=lambda x: x.transpose(1, 2)[mask])


def flex_documents(compile_with: Callable[..., Any] | None, inputs: Inputs) -> Prepared:
    """FlexAttention over the packed rows as one sequence, with a mask by document."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    lengths = inputs.positional["cu_seqlens_q"].diff()
    document = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)

    def same(batch, head, row, key):
        return document[row] == document[key]

    total = len(document)
    # Compiled, so that the mask of all pairs is never held.
    build = create_block_mask if compile_with is None else compile_with(create_block_mask)
    block_mask = build(same, None, None, total, total, device=lengths.device.type)
    ready = [
        x.detach().transpose(0, 1)[None].requires_grad_(bool(inputs.gradients))
        for x in list(inputs.positional.values())[:3]
    ]
    function = compile_with(flex_attention) if compile_with else flex_attention
    return Prepared(
        lambda: function(*ready, block_mask=block_mask),
        ready,
        restore=lambda x: x[0].transpose(0, 1),
    )


def _padding(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Row of each padded position, the last row + 1 for padding, and which positions are real."""
    starts = inputs.positional["cu_seqlens_q"][:-1]
    lengths = inputs.positional["cu_seqlens_q"].diff()
    positions = torch.arange(int(lengths.max()), device=lengths.device)
    mask = positions < lengths[:, None]
    rows = torch.where(mask, starts[:, None] + positions, int(lengths.sum()))
    return rows, mask


Compile = Callable[..., Any] | None


def dense_peers(compile_with: Compile) -> dict[str, Callable[[Inputs], Prepared]]:
    """Name → how it is prepared. ``compile_with``: ``torch.compile`` with options, or None."""
    return {
        "sdpa FLASH": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
        "sdpa CUDNN": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
        "sdpa EFFICIENT": functools.partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
        "FlexAttention": functools.partial(flex, compile_with),
        "torch.compile": functools.partial(plain, compile_with),
        "eager": functools.partial(plain, None),
        "flash-attn": flash_package,
    }


def varlen_peers(compile_with: Compile) -> dict[str, Callable[[Inputs], Prepared]]:
    """Name → how it is prepared, for packed inputs."""
    return {
        "torch varlen_attn": varlen,
        "sdpa FLASH padded": functools.partial(padded, SDPBackend.FLASH_ATTENTION),
        "sdpa CUDNN padded": functools.partial(padded, SDPBackend.CUDNN_ATTENTION),
        "sdpa EFFICIENT padded": functools.partial(padded, SDPBackend.EFFICIENT_ATTENTION),
        "FlexAttention documents": functools.partial(flex_documents, compile_with),
        "flash-attn varlen": flash_varlen_package,
    }
