"""All layers of an encoder in one call, for inference, and the choice of its backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.activations import ACTIVATIONS, UNGATED
from fastbert.ops import backend as backends
from fastbert.ops.arguments import (
    check_cu_seqlens,
    require,
    require_eps,
    require_same_device,
    require_shape,
)
from fastbert.ops.layer_parts import PART_BACKENDS, PARTS, Parts, launchers
from fastbert.ops.layer_weights import OF_PRODUCTS, PARAMETERS
from fastbert.ops.register import differentiable, operator

# The number of tensors for each layer in the argument `scales` of `encoder`.
SCALES = 8
# The backends that can run all layers in one call. With int8 weights, only INT8_BACKENDS can do so.
BACKENDS, INT8_BACKENDS = ("cpu", "triton"), ("cpu",)
ONE_CALL = "all layers in one call"
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
    key_value_heads: int | None = None,
    projections: int = 1,
    scales: Sequence[Tensor] = (),
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    rotations: Sequence[Tensor] = (),
    windows: Sequence[int] = (),
    positions: Sequence[Tensor] = (),
    scale: float | None = None,
    inner_projections: int = 1,
    pre_norm: bool = False,
    rms_norm: bool = False,
    eps: float = 1e-12,
    activation: str = "gelu",
    dtype: torch.dtype | None = None,
    all_states: bool = False,
    backend: str | None = None,
    attention_backend: str = "triton",
    feed_forward_backend: str = "triton",
    layer_norm_backend: str = "triton",
) -> list[Tensor]:
    """Run all layers of a BERT encoder in one call, without dropout and without gradients.

    The backend ``"triton"`` runs layers of BERT only: it refuses `rotations`, `windows`,
    `positions`, `scale`, fewer `key_value_heads`, two `inner_projections`, `pre_norm`, `rms_norm`,
    a gated `activation` and absent parameters.

    Args:
        hidden: Rows of shape ``(T, H)``: packed sequences if `cu_seqlens` is given, and otherwise
            `batch` sequences of `max_seqlen` rows each.
        parameters: `PARAMETERS` tensors for each layer: the weight and the bias of six parts. The
            parts are the fused projection of q, k and v, the projection after attention, its layer
            norm, both linear layers of the feed-forward, and the last layer norm. With int8
            weights, the weight of a linear layer is the ``packed`` of an ``Int8Weight``. With
            several `projections`, their weights and then their biases replace the first two
            tensors. With two `inner_projections`, their weights and then their biases replace the
            weight and the bias of the first linear layer of the feed-forward. A tensor without
            elements stands for an absent bias, or for an absent layer norm before attention.
        cu_seqlens: Cumulative lengths of the packed sequences, int32 of shape ``(B + 1,)``.
        max_seqlen: Length of the longest sequence.
        batch: Number of sequences.
        heads: Number of attention heads.
        key_value_heads: Number of heads of the keys and values, each shared by as many consecutive
            heads of the queries; `heads` by default, and the only value with int8 weights.
        projections: Number of linear layers whose results, side by side, are q, k and v. Only the
            backend ``"cpu"`` without int8 weights takes more than 1.
        scales: With int8 weights, `SCALES` tensors for each layer: ``scale`` and ``column_sum`` of
            each linear layer.
        mask: 4-D bool mask as in `attention`; allowed only without `cu_seqlens`.
        bias: 4-D floating bias as in `attention`. With `cu_seqlens`, only the backend ``"cpu"``
            takes a bias, which is indexed by positions inside the sequences.
        rotations: For each layer two tensors, the cosines and the sines, as in `rotary`; empty
            without rotary embeddings.
        windows: For each layer, the largest distance between a query and a key that the query
            attends to, where -1 sets no limit; empty if no layer has a limit.
        positions: For each layer three tensors: `index`, `position_keys` and `position_queries` of
            `relative_attention`, where both tables have the shape ``(P, H)``; a table without
            elements is absent. Empty without relative positions, which take neither `bias` nor
            `windows`.
        scale: Factor of the attention logits; ``D ** -0.5`` by default.
        inner_projections: Number of linear layers whose results, side by side, are the first
            product of the feed-forward: 1 or 2, and only 1 with int8 weights.
        pre_norm: Whether the layer norms come before attention and the feed-forward. A layer then
            adds the results of both to its rows without a further norm. Not allowed with int8
            weights.
        rms_norm: Whether the norms are those of ``ops.rms_norm``; allowed only with `pre_norm`.
        eps: As in `layer_norm`, or as in `rms_norm`.
        activation: As in `feed_forward`.
        dtype: Dtype of the results of the products; the dtype of `hidden` by default. The rows
            between the layers have the dtype of `hidden`. Under autocast, `hidden` is fp32, and
            `dtype` is autocast's dtype.
        all_states: Whether the rows after every layer are returned, not only the rows after the
            last layer.
        backend: ``"cpu"`` or ``"triton"``; None takes ``"cpu"`` for rows on the CPU and
            ``"triton"`` otherwise. The backend ``"triton"`` takes no int8 weights. With this
            backend, `dtype` and the dtype of the weights of the products must be that of `hidden`.
        attention_backend: ``"triton"`` or ``"cuda"``: the backend of attention if all layers run
            with the backend ``"triton"``.
        feed_forward_backend: As `attention_backend`, for the first product of each feed-forward.
        layer_norm_backend: As `attention_backend`, for the layer norms.

    Returns:
        List of tensors of shape ``(T, H)``: the rows after each layer with `all_states`, and
        otherwise only the rows after the last layer.

    Raises:
        ValueError: If a shape, a device or a value is not allowed, or if `backend` cannot serve the
            call. The message names the argument, its value and what is allowed.
        TypeError: If a dtype is not allowed; the backend ``"triton"`` raises ValueError for `dtype`
            and for the dtype of a parameter.
        RuntimeError: If the gradient of a result is computed.

    Note:
        Devlin et al. 2019.
    """
    require(hidden.dim() == 2, "hidden", f"shape {tuple(hidden.shape)}", "(T, H)")
    allowed = ", ".join(ACTIVATIONS)
    require(activation in ACTIVATIONS, "activation", repr(activation), allowed)
    require_eps(eps)
    if backend is None:
        backend = "cpu" if hidden.device.type == "cpu" else "triton"
    require(backend in BACKENDS, "backend", repr(backend), f"None, {', '.join(BACKENDS)}")
    reason = backends.unavailable(backend, hidden.device.type)
    allowed = f"a tensor that the {backend} backend takes: {reason}"
    require(reason is None, "hidden", hidden.device, allowed)
    for name, part in (
        ("attention_backend", attention_backend),
        ("feed_forward_backend", feed_forward_backend),
        ("layer_norm_backend", layer_norm_backend),
    ):
        require(part in PART_BACKENDS, name, repr(part), ", ".join(PART_BACKENDS))
    return _encoder(
        hidden, list(parameters), list(scales), cu_seqlens, mask, bias, list(rotations),
        list(windows), list(positions), scale, batch, max_seqlen, heads,
        heads if key_value_heads is None else key_value_heads, projections, inner_projections,
        pre_norm, rms_norm, eps, activation, hidden.dtype if dtype is None else dtype, all_states,
        attention_backend, feed_forward_backend, layer_norm_backend, backend,
    )  # fmt: skip


class LayersChoice(NamedTuple):
    """The backend of the layers of an encoder, and the reason for this choice.

    Attributes:
        backend: Backend of all layers. If not all layers run in a single call, the backend of the
            first operation that prevents the single call.
        reason: The reason for the choice, in words.
        together: Whether all layers run in a single call.
    """

    backend: str
    reason: str
    together: bool


def choose(
    request: backends.Request,
    requested: dict[str, str | None],
    operations: Sequence[str] = OPERATIONS,
) -> LayersChoice:
    """Choose the backend of the layers.

    Args:
        request: Properties of the call.
        requested: The requested backend of each operation; an operation that is missing or has the
            value None chooses its backend.
        operations: The operations of a layer.

    Returns:
        The backend ``"cpu"`` or ``"triton"`` if that backend serves every operation; all layers
        then run in one call. In a call of ``"triton"``, the backend ``"cuda"`` may serve attention,
        feed-forward and layer norm. Otherwise the layers run one by one, and the result names the
        backend of the first operation that prevents a single call. For int8 weights, only ``"cpu"``
        can run all layers in one call.

    Raises:
        ValueError: If a requested backend cannot serve its operation.
    """
    allowed: Sequence[str] = INT8_BACKENDS if "int8_linear" in operations else BACKENDS
    others = []
    for op in operations:
        choice = backends.resolve(op, requested.get(op), request)
        if op in PARTS and choice.backend == "cuda" and allowed == ("triton",):
            others.append(op)
            continue
        if choice.backend not in allowed:
            reason = f"layer by layer: {op} is served by {choice.backend}: {choice.reason}"
            return LayersChoice(choice.backend, reason, False)
        allowed = (choice.backend,)
    by_others = f", by cuda: {', '.join(others)}" if others else ""
    return LayersChoice(allowed[0], ONE_CALL + by_others, True)


# The operator


def _forward(*arguments: Any) -> list[Tensor]:
    *given, attention, feed_forward, layer_norm, backend = arguments
    if backend == "cpu":
        return torch.ops.fastbert_C.encoder(*given)
    return _triton_forward(Parts(attention, feed_forward, layer_norm), *given)


def _triton_forward(
    parts: Parts,
    hidden: Tensor,
    parameters: list[Tensor],
    scales: list[Tensor],
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    rotations: list[Tensor],
    windows: list[int],
    positions: list[Tensor],
    scale: float | None,
    batch: int,
    max_seqlen: int,
    heads: int,
    key_value_heads: int,
    projections: int,
    inner_projections: int,
    pre_norm: bool,
    rms_norm: bool,
    eps: float,
    activation: str,
    dtype: torch.dtype,
    all_states: bool,
) -> list[Tensor]:
    from fastbert.kernels.encoder import encoder_forward

    require(projections == 1, "projections", projections, "1 on the triton backend")
    for name, got in (("rotations", rotations), ("windows", windows), ("positions", positions)):
        require(not got, name, f"{len(got)} entries", "none on the triton backend")
    require(scale is None, "scale", scale, "None on the triton backend")
    allowed = f"{heads} on the triton backend"
    require(key_value_heads == heads, "key_value_heads", key_value_heads, allowed)
    allowed = "1 on the triton backend"
    require(inner_projections == 1, "inner_projections", inner_projections, allowed)
    for name, flag in (("pre_norm", pre_norm), ("rms_norm", rms_norm)):
        require(not flag, name, flag, "False on the triton backend")
    allowed = f"{', '.join(UNGATED)} on the triton backend"
    require(activation in UNGATED, "activation", repr(activation), allowed)
    layers = _checked_layers(hidden, parameters, heads)
    require(not scales, "scales", f"{len(scales)} tensors", "none on the triton backend")
    require(dtype == hidden.dtype, "dtype", dtype, f"{hidden.dtype}, as hidden")
    if cu_seqlens is None:
        rows = hidden.shape[0]
        given, allowed = f"{batch} and {max_seqlen}", f"a product of {rows}"
        require(batch * max_seqlen == rows, "batch, max_seqlen", given, allowed)
    else:
        check_cu_seqlens("cu_seqlens", cu_seqlens, "hidden", hidden.device)
        require(mask is None and bias is None, "mask, bias", "a tensor", "None with cu_seqlens")
    shape = (batch, heads, max_seqlen, max_seqlen)
    return encoder_forward(
        hidden if hidden.is_contiguous() else hidden.contiguous(),
        layers,
        cu_seqlens=cu_seqlens,
        # The kernels take views of the full shape, with stride 0 where a dimension is broadcast.
        mask=None if mask is None else mask.expand(shape),
        bias=None if bias is None else bias.to(hidden.dtype).expand(shape),
        batch=batch,
        max_seqlen=max_seqlen,
        heads=heads,
        eps=eps,
        activation=activation,
        all_states=all_states,
        launchers=launchers(parts),
    )


def _checked_layers(hidden: Tensor, parameters: list[Tensor], heads: int) -> list[list[Tensor]]:
    """Return the parameters of each layer after checks of shapes, devices and dtypes."""
    count, width = len(parameters), hidden.shape[1]
    require(
        count > 0 and count % PARAMETERS == 0,
        "parameters", f"{count} tensors", f"{PARAMETERS} for each layer",
    )  # fmt: skip
    require(heads > 0 and width % heads == 0, "heads", heads, f"a divisor of {width}")
    inner = parameters[6].shape[0]
    row = (width,)
    shapes: tuple[tuple[int, ...], ...] = (
        (3 * width, width), (3 * width,), (width, width), row, row, row,
        (inner, width), (inner,), (width, inner), row, row, row,
    )  # fmt: skip
    device, dtype = hidden.device, hidden.dtype
    layers = [parameters[i : i + PARAMETERS] for i in range(0, count, PARAMETERS)]
    for number, layer in enumerate(layers):
        for i, (parameter, shape) in enumerate(zip(layer, shapes, strict=True)):
            if parameter.shape != shape or parameter.device != device:
                name = f"parameters[{PARAMETERS * number + i}]"
                require_shape(name, parameter, shape)
                require_same_device("hidden", device, **{name: parameter})
            if parameter.dtype != dtype and i in OF_PRODUCTS:
                name = f"parameters[{PARAMETERS * number + i}]"
                require(False, name, parameter.dtype, f"{dtype}, as hidden")
    return layers


def _fake(a: Any) -> list[Tensor]:
    of_layer = PARAMETERS + 2 * (a.projections + a.inner_projections - 2)
    layers = len(a.parameters) // of_layer if a.all_states else 1
    return [torch.empty_like(a.hidden) for _ in range(layers)]


def _backward(ctx: Any, *gradients: Any) -> dict[str, Tensor]:
    raise RuntimeError(
        "fastbert::encoder has no derivative: call the layers one by one to compute gradients"
    )


_encoder = operator(
    "encoder(Tensor hidden, Tensor[] parameters, Tensor[] scales, Tensor? cu_seqlens, "
    "Tensor? mask, Tensor? bias, Tensor[] rotations, int[] windows, Tensor[] positions, "
    "float? scale, SymInt batch, SymInt max_seqlen, int heads, int key_value_heads, "
    "int projections, int inner_projections, bool pre_norm, bool rms_norm, float eps, "
    "str activation, ScalarType dtype, bool all_states, str attention, str feed_forward, "
    "str layer_norm, str backend) -> Tensor[]",
    _fake,
    forward=_forward,
)
differentiable("encoder", _backward, lambda ctx, inputs, output: None)
