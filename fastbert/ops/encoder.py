"""All layers of an encoder in one call, for inference, and the choice of its backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastbert.activations import PLAIN
from fastbert.ops import backend as backends
from fastbert.ops.arguments import require
from fastbert.ops.register import differentiable, operator

# Numbers of tensors of a layer among the arguments `parameters` and `scales` of `encoder`.
PARAMETERS, SCALES = 12, 8
OPERATIONS = ("linear", "attention", "feed_forward", "layer_norm")
INT8_OPERATIONS = ("int8_linear", "attention", "layer_norm")


def encoder(
    hidden: Tensor,
    parameters: Sequence[Tensor],
    cu_seqlens: Tensor | None = None,
    max_seqlen: int = 0,
    *,
    batch: int,
    heads: int,
    scales: Sequence[Tensor] = (),
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-12,
    activation: str = "gelu",
    dtype: torch.dtype | None = None,
    all_states: bool = False,
) -> list[Tensor]:
    """Run all layers of a BERT encoder in one call, without dropout and without gradients.

    Args:
        hidden: Rows of shape ``(T, H)`` on the CPU: packed sequences with `cu_seqlens`, otherwise
            ``T = batch · max_seqlen``.
        parameters: `PARAMETERS` tensors for each layer: weight and bias of the fused projection of
            q, k and v, of the projection after attention, of its layer norm, of both linear layers
            of the feed-forward, and of the last layer norm. With int8 weights, the weight of a
            linear layer is the ``packed`` of an ``Int8Weight``.
        cu_seqlens: Cumulative lengths of the packed sequences, int32 of shape ``(B + 1,)``.
        max_seqlen: Length of the longest sequence.
        batch: Number of sequences.
        heads: Number of attention heads.
        scales: With int8 weights, `SCALES` tensors for each layer: ``scale`` and ``column_sum`` of
            each linear layer.
        mask: 4-D bool mask as in `attention`, without `cu_seqlens`.
        bias: 4-D floating bias as in `attention`, without `cu_seqlens`.
        eps: As in `layer_norm`.
        activation: ``"gelu"``, ``"gelu_tanh"`` or ``"relu"``.
        dtype: Dtype of the results of the products; that of `hidden` by default. Under autocast
            `hidden` is fp32 and stays fp32 from layer to layer.
        all_states: Whether the rows after every layer are returned, not only the rows after the
            last layer.

    Returns:
        List of tensors of shape ``(T, H)``, one for each layer with `all_states`, else one.

    Raises:
        ValueError: If a shape, a device or a value is not allowed, or if `backend` cannot serve the
            call. The message names the argument, its value and what is allowed.
        TypeError: If a dtype is not allowed.
        RuntimeError: If a gradient is asked for.

    Note:
        Devlin et al. 2019.
    """
    require(hidden.dim() == 2, "hidden", f"shape {tuple(hidden.shape)}", "(T, H)")
    require(activation in PLAIN, "activation", repr(activation), ", ".join(PLAIN))
    reason = backends.unavailable("cpu", hidden.device.type)
    require(
        reason is None, "hidden", hidden.device, f"a tensor that the cpu backend takes: {reason}"
    )
    return _encoder(
        hidden, list(parameters), list(scales), cu_seqlens, mask, bias, batch, max_seqlen, heads,
        eps, activation, hidden.dtype if dtype is None else dtype, all_states,
    )  # fmt: skip


def choose(
    request: backends.Request,
    requested: dict[str, str | None],
    operations: Sequence[str] = OPERATIONS,
) -> backends.Choice:
    """Choose the backend of the layers.

    Args:
        request: Properties of the call.
        requested: The requested backend by operation.
        operations: The operations of a layer.

    Returns:
        The choice ``"cpu"`` if the cpu backend serves every operation; all layers then run in one
        call. Otherwise the backend of the first operation that another backend serves; the layers
        then run one by one.

    Raises:
        ValueError: If a requested backend cannot serve its operation.
    """
    for op in operations:
        choice = backends.resolve(op, requested.get(op), request)
        if choice.backend != "cpu":
            reason = f"layer by layer: {op} is served by {choice.backend}: {choice.reason}"
            return backends.Choice(choice.backend, reason)
    return backends.Choice("cpu", "all layers in one call")


# The operator


def _forward(*arguments: Any) -> list[Tensor]:
    return torch.ops.fastbert_C.encoder(*arguments)


def _fake(a: Any) -> list[Tensor]:
    layers = len(a.parameters) // PARAMETERS if a.all_states else 1
    return [torch.empty_like(a.hidden) for _ in range(layers)]


def _backward(ctx: Any, *gradients: Any) -> dict[str, Tensor]:
    raise RuntimeError(
        "fastbert::encoder has no derivative: call the layers one by one to compute gradients"
    )


_encoder = operator(
    "encoder(Tensor hidden, Tensor[] parameters, Tensor[] scales, Tensor? cu_seqlens, "
    "Tensor? mask, Tensor? bias, SymInt batch, SymInt max_seqlen, int heads, float eps, "
    "str activation, ScalarType dtype, bool all_states) -> Tensor[]",
    _fake,
    forward=_forward,
)
differentiable("encoder", _backward, lambda ctx, inputs, output: None)
