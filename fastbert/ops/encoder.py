"""All layers of an encoder in one call, for inference: public function, operator, and whether the
operations inside are served by the backend that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastbert.activations import PLAIN
from fastbert.ops import backend as backends
from fastbert.ops.arguments import require
from fastbert.ops.register import differentiable, operator

# Of each layer, in this order: weight and bias of the fused q, k, v, of the projection behind
# attention and of the layer norm behind it, of both layers of the feed-forward and of the layer
# norm behind those. With int8 weights also, of the four linear layers, scale and column sums.
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
    """The rows that leave the last layer of a BERT encoder, or with ``all_states`` each one
    (Devlin et al. 2019), without dropout and without gradients.

    hidden (T, H): packed sequences with cu_seqlens int32 (B+1,), or T = batch · max_seqlen;
    parameters: ``PARAMETERS`` tensors for each layer; with int8 weights, all of them, each is the
    ``packed`` of an ``ops.int8_linear.Int8Weight``, and ``scales`` holds ``SCALES`` tensors for
    each layer, ``scale`` and ``column_sum`` of each. mask bool and bias floating, 4-D, as in
    ``attention``, without cu_seqlens. dtype: that of the products' results, hidden's by default;
    under autocast hidden is fp32 and stays so from layer to layer. CPU tensors only.

    Raises ValueError or TypeError naming the argument; RuntimeError where a gradient is asked for.
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
    """Who serves the layers: the CPU's one call where its backend serves every one of the
    ``operations`` inside; else, layer by layer, the backend of the first operation that is
    another's. ``requested``: the backend asked for by operation. Raises ValueError where one cannot
    serve."""
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
        "fastbert::encoder has no derivative: the layers have one when each is called by itself"
    )


_encoder = operator(
    "encoder(Tensor hidden, Tensor[] parameters, Tensor[] scales, Tensor? cu_seqlens, "
    "Tensor? mask, Tensor? bias, SymInt batch, SymInt max_seqlen, int heads, float eps, "
    "str activation, ScalarType dtype, bool all_states) -> Tensor[]",
    _fake,
    forward=_forward,
)
differentiable("encoder", _backward, lambda ctx, inputs, output: None)
