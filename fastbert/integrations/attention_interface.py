"""``attn_implementation="fastbert"`` for the models of transformers; importing this registers it.

Only attention is replaced: the function that a model calls between its projections, and the one
that makes its mask. Without the second one transformers passes no mask at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert import ops, reference
from fastbert.integrations.packing import restarts
from fastbert.ops.attention_context import attention_context
from fastbert.ops.product import needs_gradient

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask
except ImportError as error:
    raise ImportError(
        f"attn_implementation='fastbert' needs transformers >= 5 ({error}): "
        "pip install 'fastbert[transformers]'"
    ) from error

NAME = "fastbert"
# What a host may hand over and no kernel here computes.
REFUSED = ("head_mask", "position_bias", "s_aux", "softcap")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    output_attentions: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """softmax(q kᵀ scaling + mask) v as transformers wants it.

    query (B, H, Lq, D), key and value (B, H, Lk, D). attention_mask: bool or 0/1 integers, nonzero
    = attend, or floating and added to the logits; (B, Lk), (B, Lq, Lk) or broadcastable to (B, H,
    Lq, Lk). Rows of packed sequences attend to their own sequence alone: cu_seq_lens int32 (N+1,)
    with B = 1, or without a mask position_ids (B, L) that restart. Returns (B, Lq, H, D) and, with
    output_attentions, the weights before dropout, (B, H, Lq, Lk), else None.

    Raises ValueError naming what cannot be served. An exported graph holds plain PyTorch.
    """
    for name in REFUSED:
        if options.get(name) is not None:
            raise ValueError(
                f"{name}: got a value, allowed: None with attn_implementation={NAME!r}"
            )
    if key.shape[1] != query.shape[1]:
        raise ValueError(f"key: got {key.shape[1]} heads, allowed: {query.shape[1]}, as query has")
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    # As in transformers: a mask says all, and a single query sees all that came before.
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    exporting = torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export()
    operations: Any = reference if exporting else ops
    shared: dict[str, Any] = {"dropout_p": dropout, "scale": scaling}
    if cu_seq_lens_q is None and attention_mask is None and position_ids is not None:
        batch, length = query.shape[0], query.shape[2]
        if key.shape[2] == length:
            attention_mask, cu_seq_lens_q = restarts(position_ids, batch, length)
    if cu_seq_lens_q is None:
        return _dense(
            operations, query, key, value, attention_mask, causal, output_attentions, shared
        )
    if output_attentions:
        raise ValueError("output_attentions: got True, allowed: False for packed sequences")
    if attention_mask is not None:
        raise ValueError("attention_mask: got a mask, allowed: None beside cu_seq_lens_q")
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    lengths = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    out = operations.attention_varlen(*rows, *lengths, causal=causal, **shared)
    return out.view(query.shape[0], query.shape[2], *out.shape[1:]), None


def _dense(operations, query, key, value, attention_mask, causal, weighed, shared):
    mask, bias = _as_arguments(attention_mask, key.shape[2])
    if weighed and operations is ops and needs_gradient(query, key, value, bias):
        # The output is computed from the weights, so that gradients reach them.
        weights = ops.attention_weights(
            query, key, mask=mask, bias=bias, causal=causal, scale=shared["scale"]
        )
        out = attention_context(weights, value, dropout_p=shared["dropout_p"])
        return out.transpose(1, 2).contiguous(), weights
    result = operations.attention(
        query, key, value, mask=mask, bias=bias, causal=causal, return_weights=weighed, **shared
    )
    out, weights = result if weighed else (result, None)
    return out.transpose(1, 2).contiguous(), weights


def _as_arguments(mask: Tensor | None, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """``mask`` and ``bias`` of ``ops.attention``."""
    if mask is None:
        return None, None
    if mask.dim() not in (2, 3, 4):
        raise ValueError(f"attention_mask: got shape {tuple(mask.shape)}, allowed: 2-D, 3-D or 4-D")
    if mask.dim() == 2:
        mask = mask[:, None, None]
    elif mask.dim() == 3:
        mask = mask[:, None]
    mask = mask[..., :keys]
    return (None, mask) if mask.is_floating_point() else (mask.bool(), None)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = bidirectional_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    """The ``attention_mask`` that ``attention`` gets: of padding alone bool (B, 1, 1, Lk), of a
    window or causal bool (B, 1, Lq, Lk), None where every key may be attended. A 3-D mask of the
    caller stays what it is.
    """
    if attention_mask is not None and attention_mask.dim() == 3:
        if mask_function is not bidirectional_mask_function:
            raise ValueError("attention_mask: got a 3-D mask, allowed: 2-D or 4-D in this model")
        return attention_mask[:, None]
    if mask_function is bidirectional_mask_function and allow_is_bidirectional_skip:
        if attention_mask is None:
            return None
        padding = F.pad(attention_mask, (0, kv_length + kv_offset - attention_mask.shape[-1]))
        padding = padding[:, None, None, kv_offset:].bool()
        whole = not torch.compiler.is_compiling() and bool(padding.all())
        return None if whole else padding
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **(options | {"allow_is_causal_skip": False}),
    )


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
