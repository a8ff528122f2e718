"""The peers: functions of stock PyTorch with which the operations of fastbert are compared.

A peer takes the arguments of the operation with the same name and computes the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Run the kernel that PyTorch chooses; a 2-D mask has the shape (batch, keys)."""
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    """Attend in packed sequences, with PyTorch's varlen kernel for 16-bit dtypes on a GPU.

    For fp32 and on a CPU, the function runs SDPA once per sequence.
    """
    if q.is_cuda and q.dtype != torch.float32:  # The varlen kernel takes 16-bit dtypes only.
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    lengths = cu_seqlens_q.diff().tolist()
    sequences = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    # SDPA gets each sequence in the shape (1, heads, length, head dimension).
    parts = [
        F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in sequence))[0]
        for sequence in sequences
    ]
    return torch.cat([part.transpose(0, 1) for part in parts])


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-12,
) -> Tensor:
    """Run bias, dropout, residual and layer norm one after another."""
    if x_bias is not None:
        x = x + x_bias
    if dropout_p:
        x = F.dropout(x, dropout_p)
    if residual is not None:
        x = x + residual
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(
    x: Tensor, weight: Tensor, *, residual: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Run residual and RMS norm one after another."""
    return F.rms_norm(x if residual is None else x + residual, x.shape[-1:], weight, eps)


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, approximate: str = "none"
) -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def feed_forward(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


def embedding(
    ids: Tensor,
    token_types: Tensor,
    positions: Tensor,
    word_table: Tensor,
    type_table: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-12,
    padding_idx: int | None = None,
) -> Tensor:
    """Run three gathers, two sums and layer norm one after another."""
    summed = (
        F.embedding(ids, word_table, padding_idx)
        + F.embedding(token_types, type_table)
        + F.embedding(positions, position_table)
    )
    return F.layer_norm(summed, summed.shape[-1:], weight, bias, eps)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> Tensor:
    """Compute the logits of all tokens, and then the mean loss of the labelled tokens."""
    return F.cross_entropy(F.linear(hidden, weight, bias), labels)


OPS: Mapping[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (
        attention,
        attention_varlen,
        layer_norm,
        rms_norm,
        linear_gelu,
        feed_forward,
        embedding,
        linear_cross_entropy,
    )
}
