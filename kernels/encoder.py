"""Inference of all layers of a BERT encoder: kernel launches for one layer after another.

A layer takes four kernels and three library GEMMs if its feed-forward takes the fused path
(tiles.gemm_path). The results have the same bits as the results of the separate modules. If all
kernels are Triton kernels, all layers write the results of these kernels to the same memory. The
library GEMMs and the CUDA C++ kernels allocate their own results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.kernels.layer_parts import TRITON, Launchers


def encoder_forward(
    hidden: Tensor,
    layers: Sequence[Sequence[Tensor]],
    *,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    batch: int,
    max_seqlen: int,
    heads: int,
    eps: float,
    activation: str,
    all_states: bool,
    launchers: Launchers = TRITON,
) -> list[Tensor]:
    """Run the layers on rows.

    Args:
        hidden: Rows (T, N), contiguous; fp32, fp16 or bf16.
        layers: The twelve parameters of each layer, in the order of ``fastbert.ops.encoder``. The
            weights of products have the dtype of `hidden`.
        cu_seqlens: Cumulative lengths of the sequences, int32 (B + 1,), or None if T is
            `batch` · `max_seqlen`.
        mask: Bool mask, expanded to (B, heads, L, L), or None.
        bias: Additive bias in the dtype of `hidden`, expanded to (B, heads, L, L), or None.
        batch: Number of sequences.
        max_seqlen: Length of the longest sequence.
        heads: Number of heads.
        eps: Term that is added to the variance in layer norms.
        activation: Name of an activation in ``fastbert.activations`` that is not gated.
        all_states: Whether the rows after every layer are returned, not only the rows after the
            last layer.
        launchers: The launchers of attention, feed-forward and layer norm.

    Returns:
        The rows (T, N) after each layer with `all_states`, and otherwise the rows after the last
        layer.
    """
    attention, feed_forward, layer_norm = launchers
    width = hidden.shape[1]
    is_packed = cu_seqlens is not None
    shape = (3, heads, width // heads)
    shape = (hidden.shape[0], *shape) if is_packed else (batch, max_seqlen, *shape)
    scale = (width // heads) ** -0.5
    results = None
    # The result of a layer's first norm is not needed after the layer, so all layers share its
    # memory.
    first_results = layer_norm.allocate(hidden)
    statistics = None if first_results is None else first_results[1:]
    inner = feed_forward.allocate(hidden, layers[0][6].shape[0])
    states: list[Tensor] = []
    for number, parameters in enumerate(layers):
        wqkv, bqkv, wo, bo, weight1, bias1, w1, b1, w2, b2, weight2, bias2 = parameters
        q, k, v = F.linear(hidden, wqkv, bqkv).view(shape).unbind(-3)
        if not is_packed:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if results is None:
            results = attention.allocate(q, is_packed)
        out, _ = attention.forward(
            q, k, v,
            mask=mask, bias=bias, cu_seqlens_q=cu_seqlens, max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen, scale=scale, into=results,
        )  # fmt: skip
        attended = (out if is_packed else out.transpose(1, 2)).view(hidden.shape)
        first, _, _ = layer_norm.forward(
            F.linear(attended, wo), weight1, bias1,
            residual=hidden, x_bias=bo, eps=eps, into=first_results,
        )  # fmt: skip
        activated, _ = feed_forward.forward(
            first, w1, b1, activation=activation, save=False, into=inner
        )
        last_results = None
        if statistics is not None:
            # No later step reads the input of the layer, so the result overwrites it, except if the
            # input belongs to the caller (in the first layer) or is returned (with all_states).
            if all_states or number == 0:
                hidden = torch.empty_like(hidden)
            last_results = (hidden, *statistics)
        hidden, _, _ = layer_norm.forward(
            F.linear(activated, w2), weight2, bias2,
            residual=first, x_bias=b2, eps=eps, into=last_results,
        )  # fmt: skip
        states = [*states, hidden] if all_states else [hidden]
    return states
