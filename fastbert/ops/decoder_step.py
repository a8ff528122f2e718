"""All layers of a decoder for one new token of each hypothesis, in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastbert import reference
from fastbert.activations import UNGATED
from fastbert.ops import backend as backends
from fastbert.ops.arguments import require
from fastbert.reference.decoder_step import PARAMETERS

__all__ = ["BACKENDS", "PARAMETERS", "decoder_step"]

BACKENDS = ("cpu", "reference")


def decoder_step(
    hidden: Tensor,
    parameters: Sequence[Tensor],
    cache: Tensor,
    slots: Tensor,
    position: int,
    source_cache: Tensor,
    cu_seqlens: Tensor,
    sources: Tensor,
    *,
    heads: int,
    pre_norm: bool = False,
    eps: float = 1e-5,
    activation: str = "relu",
    backend: str | None = None,
) -> Tensor:
    """Run one new token of each hypothesis through all layers of a decoder, without gradients.

    The keys and values of row i are stored in slot i of `cache` at `position`. The keys and values
    of an earlier position j are read from slot ``slots[i, j]``, so that a beam search only changes
    `slots` when a hypothesis continues another one.

    Args:
        hidden: Rows of shape ``(R, N)``, one for each hypothesis; fp32, fp16 or bf16, and fp64 with
            the backend ``"reference"``.
        parameters: `PARAMETERS` tensors for each layer: nine weights, each followed by its bias,
            which may have no elements. The weights are the fused projection of q, k and v, the
            projection after self-attention, its layer norm, the projection of the queries of
            cross-attention, the projection after it, its layer norm, both linear layers of the
            feed-forward, and the last layer norm.
        cache: Keys and values of the hypotheses, in the dtype of `hidden`, contiguous of shape
            ``(layers, 2, slots, H, positions, D)``. The call writes to it.
        slots: Slots of the earlier positions, int32 of shape ``(R or more, position or more)``.
        position: Position of the new token, from 0.
        source_cache: Keys and values of the packed sources, in the dtype of `hidden`, contiguous of
            shape ``(layers, 2, H, S, D)``.
        cu_seqlens: Cumulative lengths of the sources, int32 of shape ``(B + 1,)``.
        sources: Number of the source of each hypothesis, int32 of shape ``(R,)``.
        heads: Number H of attention heads.
        pre_norm: Whether the layer norms come before attention and the feed-forward.
        eps: As in `layer_norm`.
        activation: An activation of `feed_forward` that is not gated.
        backend: ``"cpu"`` or ``"reference"``; None takes ``"cpu"`` for rows on the CPU, and
            otherwise ``"reference"``.

    Returns:
        Rows of shape ``(R, N)`` after the last layer.

    Raises:
        ValueError: If a shape, a device or a value is not allowed, if a gradient is required, or if
            `backend` cannot serve the call. The message names the argument.
        TypeError: If a dtype is not allowed.

    Note:
        Vaswani et al. 2017, section 3.1.
    """
    backend = (
        ("cpu" if hidden.device.type == "cpu" else "reference") if backend is None else backend
    )
    require(backend in BACKENDS, "backend", repr(backend), f"None, {', '.join(BACKENDS)}")
    reason = backends.unavailable(backend, hidden.device.type)
    allowed = f"a tensor that the {backend} backend takes: {reason}"
    require(reason is None, "hidden", hidden.device, allowed)
    require(activation in UNGATED, "activation", repr(activation), ", ".join(UNGATED))
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (hidden, *parameters))
    require(not recorded, "hidden, parameters", "a tensor that requires a gradient", "none")
    given = (hidden, parameters, cache, slots, position, source_cache, cu_seqlens, sources)
    if backend == "cpu":
        return torch.ops.fastbert_C.decoder_step(*given, heads, pre_norm, eps, activation)
    options = {"heads": heads, "pre_norm": pre_norm, "eps": eps, "activation": activation}
    return reference.decoder_step(*given, **options)  # type: ignore[arg-type]
