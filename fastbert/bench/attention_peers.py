"""Attention kernels of PyTorch and flash-attn, with which fastbert's attention is compared (peers).

The function of a peer gets the arguments of ``fastbert.ops.attention`` or ``attention_varlen`` as
``Inputs`` and returns a ``Prepared``. If the kernel cannot compute the inputs, the function or the
run raises an error, which the benchmark stores. A layout change that a caller makes once per batch
is outside the timed part.
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
    """One attention kernel, prepared for one set of inputs.

    Attributes:
        run: Function that runs the forward pass and returns the output.
        targets: The leaf tensors whose gradients are computed, in the layout of the kernel.
        restore: Function that turns an output or a gradient into the layout of the operation of
            fastbert.
        backward: Function that computes the gradients of `targets` from the output's gradient; None
            uses autograd.
    """

    run: Callable[[], Tensor]
    targets: list[Tensor]
    restore: Callable[[Tensor], Tensor] = lambda x: x
    backward: Callable[[Tensor], Any] | None = None


def leaves(inputs: Inputs) -> Inputs:
    """Return detached inputs, in which the tensors that need gradients are leaves."""
    return inputs.map(
        lambda name, v: (
            v.detach().requires_grad_(name in inputs.gradients) if isinstance(v, Tensor) else v
        )
    )


def of_function(function: Callable[..., Tensor], inputs: Inputs, **extra: Any) -> Prepared:
    """Prepare ``function``, which takes the arguments of fastbert's operation."""
    ready = leaves(inputs)
    named = dict(ready.items())
    return Prepared(
        lambda: function(*ready.positional.values(), **ready.keyword, **extra),
        [named[name] for name in inputs.gradients],
    )


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute softmax(q kᵀ / √D) v step by step; D is the last dimension of q, k and v."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
    return scores.softmax(-1) @ v


# The dense peers take q, k and v of shape (batch, heads, length, head dimension), and the keywords
# mask, of shape (batch, keys), and dropout_p.


def _dense_mask(inputs: Inputs) -> Tensor | None:
    mask = inputs.keyword.get("mask")
    return None if mask is None else mask[:, None, None, :]


def sdpa(kernel: SDPBackend, inputs: Inputs) -> Prepared:
    """Prepare ``scaled_dot_product_attention`` with one kernel.

    A run raises a RuntimeError if the kernel cannot compute the inputs.
    """
    ready = leaves(inputs)
    q, k, v = ready.positional.values()
    mask, dropout_p = _dense_mask(ready), ready.keyword.get("dropout_p", 0.0)

    def run() -> Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, mask, dropout_p)

    return Prepared(run, [q, k, v])


def plain(compile_with: Callable[..., Any] | None, inputs: Inputs) -> Prepared:
    """Prepare `eager`, compiled with ``compile_with`` unless that is None."""
    if inputs.keyword.get("dropout_p"):
        raise ValueError(f"dropout_p: got {inputs.keyword['dropout_p']}, allowed: 0 for this peer")
    ready = leaves(inputs)
    q, k, v = ready.positional.values()
    mask = ready.keyword.get("mask")
    function = compile_with(eager) if compile_with else eager
    return Prepared(lambda: function(q, k, v, mask), [q, k, v])


def flex(compile_with: Callable[..., Any] | None, inputs: Inputs) -> Prepared:
    """Prepare FlexAttention. Key padding is a block mask, which skips whole blocks of padding."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if inputs.keyword.get("dropout_p"):
        raise ValueError(
            f"dropout_p: got {inputs.keyword['dropout_p']}, allowed: 0 for FlexAttention"
        )
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
    """Prepare ``flash_attn_func`` of the flash-attn package, if the package is installed."""
    from flash_attn import flash_attn_func

    if inputs.keyword.get("mask") is not None:
        raise ValueError("mask: got a mask, allowed: None, as flash_attn_func takes no mask")
    dropout_p = inputs.keyword.get("dropout_p", 0.0)
    ready = leaves(inputs)
    q, k, v = ready.positional.values()

    def run() -> Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_func(*rows, dropout_p=dropout_p).transpose(1, 2)

    return Prepared(run, [q, k, v])


# The packed peers take q, k and v of shape (tokens, heads, head dimension), and then cu_seqlens_q,
# cu_seqlens_k, max_seqlen_q and max_seqlen_k.


def varlen(inputs: Inputs) -> Prepared:
    """Prepare ``varlen_attn``, with the seven positional arguments of all its PyTorch versions."""
    from torch.nn.attention.varlen import varlen_attn

    if inputs.keyword.get("dropout_p"):
        raise ValueError(
            f"dropout_p: got {inputs.keyword['dropout_p']}, allowed: 0 for varlen_attn"
        )
    return of_function(varlen_attn, Inputs(inputs.positional, {}, inputs.gradients))


def flash_varlen_package(inputs: Inputs) -> Prepared:
    """Prepare ``flash_attn_varlen_func`` of the flash-attn package, if the package is installed."""
    from flash_attn import flash_attn_varlen_func

    return of_function(flash_attn_varlen_func, Inputs(inputs.positional, {}, inputs.gradients))


def padded(kernel: SDPBackend, inputs: Inputs) -> Prepared:
    """Prepare SDPA on the padded batch, with a key mask unless all lengths are equal."""
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
    """Prepare FlexAttention on the packed rows as one sequence.

    A mask makes each row attend only to the rows of its own text.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    lengths = inputs.positional["cu_seqlens_q"].diff()
    document = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)

    def same(batch, head, row, key):
        return document[row] == document[key]

    total = len(document)
    # Compiled code builds the block mask without a mask of all query-key pairs in memory.
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
    """Return the packed row of each position of the padded batch, and the mask of real positions.

    At padding, the row is the number of packed rows, which is the index of the row of zeros that
    `padded` adds.
    """
    starts = inputs.positional["cu_seqlens_q"][:-1]
    lengths = inputs.positional["cu_seqlens_q"].diff()
    positions = torch.arange(int(lengths.max()), device=lengths.device)
    mask = positions < lengths[:, None]
    rows = torch.where(mask, starts[:, None] + positions, int(lengths.sum()))
    return rows, mask


Compile = Callable[..., Any] | None


def dense_peers(compile_with: Compile) -> dict[str, Callable[[Inputs], Prepared]]:
    """Return the functions that prepare the peers of ``attention``, by name.

    ``compile_with`` is ``torch.compile`` with options; None compiles nothing.
    """
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
    """Return the functions that prepare the peers of ``attention_varlen``, by name."""
    return {
        "torch varlen_attn": varlen,
        "sdpa FLASH padded": functools.partial(padded, SDPBackend.FLASH_ATTENTION),
        "sdpa CUDNN padded": functools.partial(padded, SDPBackend.CUDNN_ATTENTION),
        "sdpa EFFICIENT padded": functools.partial(padded, SDPBackend.EFFICIENT_ATTENTION),
        "FlexAttention documents": functools.partial(flex_documents, compile_with),
        "flash-attn varlen": flash_varlen_package,
    }
