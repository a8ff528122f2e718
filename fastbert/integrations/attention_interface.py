"""``attn_implementation="fastbert"`` for the models of transformers.

The import of this module registers the implementation. The implementation replaces only attention:
the function that a model calls between its projections, and the function that makes the mask.
Without a mask function, transformers would pass no mask at all.

Examples:
    ```python
    import fastbert.integrations.attention_interface

    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="fastbert")
    ```
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
# A model of transformers may pass these options, but no kernel of fastbert computes them.
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
    """Compute ``softmax(query keyᵀ scaling + mask) value`` with the arguments of transformers.

    A token of a packed batch attends only to its own sequence. The caller marks the sequences with
    `cu_seq_lens_q` and a batch size B of 1, or, without a mask, with `position_ids` that start
    again at each sequence. An exported graph contains only PyTorch's own operations.

    Args:
        module: The attention module that calls this function. Its attribute ``is_causal`` is the
            default of `is_causal`.
        query: Queries of shape ``(B, H, Lq, D)``.
        key: Keys of shape ``(B, Hk, Lk, D)``. ``H / Hk`` consecutive heads of queries share a head.
        value: Values of shape ``(B, Hk, Lk, D)``.
        attention_mask: Bool or 0/1 integers, nonzero where a query attends to a key, or a floating
            tensor that is added to the logits. The shape is ``(B, Lk)``, ``(B, Lq, Lk)`` or
            broadcastable to ``(B, H, Lq, Lk)``.
        dropout: Probability with which an attention weight is dropped.
        scaling: Factor of the logits; ``D ** -0.5`` by default.
        is_causal: Whether a query attends only to keys at its own position or earlier. The value
            has no effect with a mask, because the mask of transformers then already excludes the
            later keys. It has no effect for a single query either, because that query is the last
            position and attends to all keys.
        position_ids: Positions of shape ``(B, Lq)`` or ``(1, Lq)``, which have an effect only if
            `attention_mask` and `cu_seq_lens_q` are None.
        cu_seq_lens_q: Cumulative lengths of the queries' sequences, int32 of shape ``(N + 1,)``.
        cu_seq_lens_k: Cumulative lengths of the keys' sequences; `cu_seq_lens_q` by default.
        max_length_q: Number of queries in the longest sequence.
        max_length_k: Number of keys in the longest sequence.
        output_attentions: Whether the attention weights are returned too.
        options: Other options of transformers. ``head_mask``, ``position_bias``, ``s_aux`` and
            ``softcap`` must be None, and all others are ignored.

    Returns:
        The output of shape ``(B, Lq, H, D)``, and the weights before dropout of shape
        ``(B, H, Lq, Lk)``, or None without `output_attentions`.

    Raises:
        ValueError: If fastbert does not support an argument. The message names the argument.
    """
    for name in REFUSED:
        if options.get(name) is not None:
            raise ValueError(
                f"{name}: got a value, allowed: None with attn_implementation={NAME!r}"
            )
    heads, stored = query.shape[1], key.shape[1]
    if stored == 0 or heads % stored != 0:
        raise ValueError(f"key: got {stored} heads, allowed: a divisor of {heads}, which query has")
    if stored != heads:
        key, value = (x.repeat_interleave(heads // stored, 1) for x in (key, value))
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    # As in transformers, a mask already excludes later keys, and a single query attends to every
    # key.
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
    """Turn the mask of a caller into the `mask` and `bias` of `ops.attention`."""
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
    """Make the mask that transformers passes to `attention`.

    Args:
        batch_size: Number of sequences, B.
        q_length: Number of queries of each sequence, Lq.
        kv_length: Number of keys of each sequence, Lk.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        mask_function: The function of transformers that decides whether a query attends to a key.
        attention_mask: The caller's mask. A mask of 2 dimensions is nonzero at real tokens; a mask
            of shape ``(B, Lq, Lk)`` is returned with its values.
        allow_is_bidirectional_skip: Whether a mask that excludes only padding may have the shape
            ``(B, 1, 1, Lk)`` or be None.
        options: Further arguments of transformers' ``sdpa_mask``.

    Returns:
        A bool mask of shape ``(B, 1, 1, Lk)`` if it excludes only padding and
        `allow_is_bidirectional_skip` is True, and otherwise ``(B, 1, Lq, Lk)``. With
        `allow_is_bidirectional_skip`, the result is None if every query may attend to every key. A
        3-D `attention_mask` is returned with a dimension of 1 for the heads.

    Raises:
        ValueError: If the caller's mask has 3 dimensions and `mask_function` is not bidirectional.
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
