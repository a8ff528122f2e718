"""The plan of an encoder: the executor of its layers, or the reason why layers run one by one.

The table in ``fastbert.modules.layer_modules`` has the expected class of each module of a layer.
`walk` finds the modules of a layer and reports each module that is not a plain instance of its
expected class (``fastbert.modules.plain``). If no module is reported, the parameters and settings
of the layers determine the executor (``fastbert.modules.executors``) that runs the layers. Without
an executor, each module of a layer runs its own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastbert.activations import UNGATED
from fastbert.modules.attention import BertSelfAttention
from fastbert.modules.executors import (
    CpuInference,
    CpuTraining,
    Executor,
    GpuInference,
    GpuTraining,
    Settings,
)
from fastbert.modules.joined_linear import JoinedLinear
from fastbert.modules.layer import PreNormLayer
from fastbert.modules.layer_modules import (
    ASKING,
    ATTENTION,
    INNER,
    INT8_ASKING,
    LEAVES,
    LINEARS,
    NORMS,
    OUTPUT,
    QKV,
    Modules,
    is_square,
    may_choose_rows,
    walk,
)
from fastbert.modules.layer_norm import RMSNorm
from fastbert.modules.plain import has_backward_hooks
from fastbert.modules.quantized_linear import QuantizedLinear
from fastbert.modules.relative_attention import RelativeSelfAttention
from fastbert.ops.backend import LOW_PRECISION, ORDER, Request
from fastbert.ops.encoder import INT8_OPERATIONS, OPERATIONS, choose
from fastbert.ops.gpu_times import MANY_ROWS, rows_class
from fastbert.ops.int8_linear import layout
from fastbert.ops.layer_weights import LayerWeights


class Mode(NamedTuple):
    """The properties of a call on which a plan depends, in addition to the modules.

    Attributes:
        device: Type of the device that holds the rows, such as ``"cpu"``.
        dtype: Dtype of the rows.
        autocast: Dtype of matrix products under autocast; None without autocast.
        gradient: Whether autograd records the call.
        rows: Result of ``ops.gpu_times.rows_class`` for the number of rows on a GPU, otherwise 0.
        length: Result of ``ops.gpu_times.length_class`` for the length of the sequences, on which
            the choice of a backend for attention depends on a GPU; 0 if the length is unknown.
    """

    device: str
    dtype: torch.dtype
    autocast: torch.dtype | None
    gradient: bool
    rows: int = 0
    length: int = 0

    @classmethod
    def now(
        cls, device: str, dtype: torch.dtype, gradient: bool, rows: int = MANY_ROWS, length: int = 0
    ) -> Mode:
        """Return the mode of a call of `rows` rows under the autocast that is active now."""
        # A device without autocast, such as meta, has no autocast dtype.
        known = device in ORDER and torch.is_autocast_enabled(device)
        return cls(
            device,
            dtype,
            torch.get_autocast_dtype(device) if known else None,
            gradient,
            rows_class(rows) if device == "cuda" else 0,
            length,
        )


class Plan(NamedTuple):
    """The way in which the layers of an encoder run.

    Attributes:
        layers: The parameters of the layers in the order in which the layers run; empty without an
            executor.
        settings: The settings of the layers; None without an executor.
        run: The executor, or None if the layers run one by one.
        backend: Backend of the executor. Without an executor, it is the backend of the first
            operation that prevents an executor, or an empty string if no operation is the reason.
        reason: The reason for `backend`, or for the lack of an executor, in words.
        chooses: Whether the last layer may compute only the rows that a head reads.
    """

    layers: list[LayerWeights]
    settings: Settings | None
    run: Executor | None
    backend: str
    reason: str
    chooses: bool = False


def one_by_one(reason: str, chooses: bool = False) -> Plan:
    """Return a plan without an executor, because `reason` requires that layers run one by one."""
    return Plan([], None, None, "", f"layer by layer: {reason}", chooses)


def plan(layers: Sequence[nn.Module], mode: Mode) -> Plan:
    """Return the plan of the layers of an encoder, with an executor if one can run the layers.

    Args:
        layers: The layers in the order in which they run.
        mode: The properties of the call.

    Returns:
        The plan, which is valid for the present state of the modules and for `mode`.

    Raises:
        ValueError: If a backend that a module asks for cannot serve its operation.
    """
    if mode.device not in ORDER:
        return one_by_one(f"the rows are on {mode.device}")
    if _has_any_global_hook():
        return one_by_one("there are hooks on all modules")
    walked = [walk(layer) for layer in layers]
    chooses = mode.device == "cpu" and may_choose_rows(walked[-1])
    for number, (_, problems) in enumerate(walked):
        for path, problem in problems.items():
            return one_by_one(f"layer.{number}{path and f'.{path}'} {problem}", chooses)
    layer_modules = [modules for modules, _ in walked]
    try:
        executor, weights, settings, reason = (_training if mode.gradient else _inference)(
            layer_modules, mode
        )
    except _NoExecutor as error:
        return Plan([], None, None, error.backend, error.reason, chooses)
    run = executor(weights, settings)
    return Plan(weights, settings, run, settings.backend, reason, chooses)


class _NoExecutor(Exception):
    """Error that is raised if no executor can run the layers.

    Args:
        reason: The reason in words.
        backend: Backend of the operation that prevents an executor; an empty string if no operation
            is the reason.
    """

    def __init__(self, reason: str, backend: str = "") -> None:
        super().__init__(reason)
        self.reason = reason if backend else f"layer by layer: {reason}"
        self.backend = backend


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise _NoExecutor(reason)


# The class of an executor, the two arguments of the class, and the reason for the backend in words.
_Planned = tuple[type[Executor], list[LayerWeights], Settings, str]


# Training


def _training(layers: list[Modules], mode: Mode) -> _Planned:
    hooked = has_backward_hooks([module for modules in layers for module in modules.values()])
    _require(not hooked, "a module has backward hooks")
    kinds = {type(modules[path]) for modules in layers for path in LINEARS}
    _require(QuantizedLinear not in kinds, "a linear layer is int8")
    on_cpu = mode.device == "cpu"
    # Of the training executors, only that of the CPU supports joined linear layers.
    _require(on_cpu or JoinedLinear not in kinds, "a linear layer is joined")
    _require_uniform_parts(layers)
    _require(not _relative(layers), "attention has relative positions")
    unusual = next(filter(None, map(_unusual_heads, layers)), None)
    _require(unusual is None, str(unusual))
    _require_halves(layers)
    rms = any(type(m[NORMS[1]]) is RMSNorm for m in layers)
    _require(not rms, "the norms are RMS norms")
    beyond = _beyond_bert(layers)
    absent = _absent() if on_cpu else None
    weights = [_weights(modules, absent) for modules in layers]
    parameters = [tensor for layer in weights for tensor in layer.flat()]
    _require_parameters(parameters)
    dtype = mode.dtype if mode.autocast is None else mode.autocast
    allowed = {dtype} if mode.autocast is None else set(LOW_PRECISION)
    dtypes = {tensor.dtype for layer in weights for tensor in layer.of_products()}
    _require(
        mode.dtype in (dtype, torch.float32) and dtypes <= allowed,
        f"rows are {mode.dtype}, products {dtype}, or parameters of another dtype",
    )
    inner = any(m[OUTPUT].training and m[OUTPUT].dropout_p > 0.0 for m in layers)
    _require(not inner, "there is dropout inside the feed-forward")
    settings, reason = _agreed(layers, ASKING, mode, dtype, OPERATIONS)
    settings = settings._replace(dropouts=tuple(map(_dropouts, layers)))
    if settings.backend == "triton":
        _require(beyond is None, str(beyond))
        _require(JoinedLinear not in kinds, "a linear layer is joined")
        _require(all(p.numel() > 0 for p in parameters), "a parameter is missing")
        return GpuTraining, weights, settings, reason
    dropped = settings.pre_norm and any(any(of_layer[1:]) for of_layer in settings.dropouts)
    _require(not dropped, "there is dropout, and the layer norms are before attention")
    dtypes = {mode.dtype, *(p.dtype for p in parameters)}
    _require(dtypes == {torch.float32}, f"rows and parameters are {dtypes}, not fp32")
    _require(all(p.is_cpu for p in parameters), "a parameter is not on the CPU")
    frozen = any(p.numel() > 0 and not p.requires_grad for p in parameters)
    _require(not frozen, "a parameter is frozen")
    return CpuTraining, weights, settings, reason


# Inference


def _inference(layers: list[Modules], mode: Mode) -> _Planned:
    kinds = {type(modules[path]) for modules in layers for path in LINEARS}
    int8, joined, on_cpu = QuantizedLinear in kinds, JoinedLinear in kinds, mode.device == "cpu"
    _require(not int8 or kinds == {QuantizedLinear}, "some linear layers are int8, others are not")
    # Only the CPU backend supports int8 weights and joined linear layers.
    _require(
        on_cpu or not (int8 or joined),
        f"a linear layer is int8 or joined, and the rows are on {mode.device}",
    )
    training = int8 and any(modules[path].training for modules in layers for path in LINEARS)
    _require(not training, "a quantised layer is in training mode")
    _require_uniform_parts(layers)
    _require_halves(layers)
    beyond = _beyond_bert(layers)
    _require(beyond is None or on_cpu, str(beyond))
    _require(beyond is None or not int8, f"a linear layer is int8, and {beyond}")
    relative = _relative(layers)
    _require(on_cpu or not relative, "attention has relative positions")
    scales: tuple[Tensor, ...] = ()
    if int8:
        weights, scales = _int8_weights(layers)
    else:
        absent = _absent() if on_cpu else None
        weights = [_weights(modules, absent) for modules in layers]
    _require_parameters([tensor for layer in weights for tensor in layer.flat()], int8)
    dtype = mode.dtype if mode.autocast is None else mode.autocast
    allowed = {dtype} if mode.autocast is None else {dtype, torch.float32}
    dtypes = {tensor.dtype for layer in weights for tensor in layer.matrices()}
    dtypes = {mode.dtype} if int8 else dtypes
    held = "rows" if int8 else "weights"
    _require(dtypes <= allowed, f"{held} are {dtypes}, the products {dtype}")
    _require(not any(map(_drops, layers)), "there is dropout in training")
    settings, reason = _agreed(
        layers,
        INT8_ASKING if int8 else ASKING,
        mode,
        dtype,
        INT8_OPERATIONS if int8 else OPERATIONS,
    )
    scale = layers[0][ATTENTION].scale
    settings = settings._replace(scales=scales, relative=relative, scale=scale)
    if settings.backend == "cpu":
        return CpuInference, weights, settings, reason
    dtypes = {mode.dtype, *(tensor.dtype for layer in weights for tensor in layer.of_products())}
    _require(dtypes == {dtype}, f"rows or parameters of products are not {dtype}")
    return GpuInference, weights, settings, reason


def _drops(modules: Modules) -> bool:
    """Return whether a layer has active dropout; a module in eval mode has none."""
    output = modules[OUTPUT]
    return any(_dropouts(modules)) or (output.training and output.dropout_p > 0.0)


# The settings of the layers


def _dropouts(modules: Modules) -> tuple[float, ...]:
    """Return the dropout probabilities of a layer.

    The result has the probability for the attention weights, and then the probabilities before the
    two residual additions. In a `PreNormLayer`, the dropouts before the additions belong to the
    layer itself, and the probabilities of its layer norms come last in the result.
    """
    layer, attention = modules[""], modules[ATTENTION]
    first = attention.dropout_p if attention.training else 0.0
    norms = [modules[path] for path in NORMS if type(modules[path]) is not nn.Identity]
    of_norms = [norm.dropout_p if norm.training else 0.0 for norm in norms]
    if type(layer) is not PreNormLayer:
        return (first, *of_norms)
    sums = (layer.dropout_p, layer.output_dropout_p) if layer.training else (0.0, 0.0)
    return (first, *sums, *of_norms)


def _require_uniform_parts(layers: list[Modules]) -> None:
    stored = {(_parts_of(modules[QKV]), _parts_of(modules[INNER])) for modules in layers}
    _require(len(stored) == 1, "the layers differ in the number of projections")


def _require_halves(layers: list[Modules]) -> None:
    rotaries = [modules[ATTENTION].rotary for modules in layers]
    neighbours = any(rotary is not None and rotary.neighbours for rotary in rotaries)
    _require(not neighbours, "attention rotates pairs of neighbours")


def _unusual_heads(modules: Modules) -> str | None:
    """Return how the heads of a layer differ from those of BERT, apart from positions, or None."""
    attention = modules[ATTENTION]
    if type(attention) is BertSelfAttention and attention.scale is not None:
        return "attention has a scale of its own"
    return None if is_square(modules) else "queries, keys or values are narrower than the rows"


def _beyond_bert(layers: list[Modules]) -> str | None:
    """Return the first feature of a layer that a layer of BERT does not have, or None."""
    for number, modules in enumerate(layers):
        if type(modules[""]) is PreNormLayer:
            return f"layer.{number} has its layer norms before attention and feed-forward"
        if modules[ATTENTION].rotary is not None or modules[ATTENTION].window is not None:
            return "attention has rotary positions or a window"
        unusual = _unusual_heads(modules)
        if unusual is not None:
            return unusual
        if modules[OUTPUT].activation not in UNGATED:
            return f"the activation is {modules[OUTPUT].activation}"
    return None


def _relative(layers: list[Modules]) -> tuple[RelativeSelfAttention, ...]:
    """Return the self-attention of each layer if the layers have relative positions, or ()."""
    attentions = [modules[ATTENTION] for modules in layers]
    kinds = {(type(attention), attention.scale) for attention in attentions}
    _require(len(kinds) == 1, "the layers differ in their relative positions or scales")
    return tuple(a for a in attentions if type(a) is RelativeSelfAttention)


def _agreed(
    layers: list[Modules],
    asking: Sequence[str],
    mode: Mode,
    dtype: torch.dtype,
    operations: Sequence[str],
) -> tuple[Settings, str]:
    """Return the settings that all layers share, and the reason for the backend in words."""
    rotaries = [m[ATTENTION].rotary for m in layers if m[ATTENTION].rotary is not None]
    distances = tuple(-1 if m[ATTENTION].window is None else m[ATTENTION].window for m in layers)
    windows = distances if max(distances) >= 0 else ()
    kinds = {(type(m[""]), type(m[NORMS[1]])) for m in layers}
    _require(
        len(kinds) == 1 and len(rotaries) in (0, len(layers)),
        "the layers differ in their norms or in rotary positions",
    )
    layer_kind, norm_kind = kinds.pop()
    attentions = [modules[ATTENTION] for modules in layers]
    heads = {(each.heads, each.key_value_heads, each.head_dim) for each in attentions}
    activations = {modules[OUTPUT].activation for modules in layers}
    # In a `PreNormLayer` encoder, the first layer has an Identity instead of its first norm.
    leaves = [m[path] for m in layers for path in NORMS if type(m[path]) is not nn.Identity]
    _require({type(norm) for norm in leaves} == {norm_kind}, "the norms of a layer differ")
    eps = {norm.eps for norm in leaves}
    modules = [m[path] for m in layers for path in asking] + rotaries
    requests = {(m.operation, m.backend) for m in modules if type(m) is not nn.Identity}
    requested = dict(requests)
    _require(
        max(map(len, (heads, activations, eps))) == 1 and len(requested) == len(requests),
        "the layers differ in heads, eps, activation or backend",
    )
    activation, (common, shared, head_dim) = activations.pop(), heads.pop()
    columns = layers[0][NORMS[1]].weight.shape[0]
    request = Request(
        mode.device, dtype, head_dim, ("window",) if windows else (), activation,
        columns=columns, length=mode.length, rows=mode.rows, trained=mode.gradient,
    )  # fmt: skip
    special = {
        "attention": layers[0][ATTENTION].operation,
        "layer_norm": norm_kind.operation,
    }
    own = [special.get(name, name) for name in operations]
    choice = choose(request, requested, (*own, "rotary") if rotaries else own)
    if not choice.together:
        raise _NoExecutor(choice.reason, choice.backend)
    settings = Settings(
        common, shared, head_dim, eps.pop(), activation, dtype, choice.backend, requested,
        bases=tuple(rotary.base for rotary in rotaries), windows=windows,
        pre_norm=layer_kind is PreNormLayer, rms_norm=norm_kind is RMSNorm,
    )  # fmt: skip
    return settings, choice.reason


# The parameters


def _require_parameters(tensors: list[Any], int8: bool = False) -> None:
    expected = {nn.Parameter, Tensor} if int8 else {nn.Parameter}
    _require(set(map(type, tensors)) == expected, "a parameter is missing or of a class of its own")


def _absent() -> nn.Parameter:
    """Return the tensor that represents an absent parameter in a call.

    The tensor is created for each plan. A constant of this Python module would depend on the
    default device, the default dtype and the inference mode at the first import of this file.
    """
    with torch.inference_mode(False):
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        return nn.Parameter(nothing, requires_grad=False)


def _parts_of(linear: nn.Module) -> int:
    return len(linear.parts) if isinstance(linear, JoinedLinear) else 1


def _weights(modules: Modules, absent: Tensor | None) -> LayerWeights:
    """Return the parameters of a layer, with `absent` for each parameter that the layer lacks."""
    # A linear layer may lack a bias. Of the layer norms, only those of a `PreNormLayer` may lack a
    # parameter.
    of_norm = absent if type(modules[""]) is PreNormLayer else None
    return LayerWeights(
        *[
            tensors
            for path in LEAVES
            for tensors in _of_leaf(modules[path], absent if path in LINEARS else of_norm)
        ]
    )


def _of_leaf(leaf: nn.Module, absent: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the weights and the biases of a module, with `absent` for a missing bias.

    An Identity instead of a norm has neither a weight nor a bias.
    """
    if isinstance(leaf, JoinedLinear):
        weights, biases = leaf.weights_and_biases()
        return tuple(weights), tuple(biases or [absent] * len(weights))
    own = leaf._parameters
    bias = own.get("bias")
    weight = absent if type(leaf) is nn.Identity else own.get("weight")
    return (weight,), (absent if bias is None else bias,)


def _int8_weights(layers: list[Modules]) -> tuple[list[LayerWeights], tuple[Tensor, ...]]:
    """Return the parameters of int8 layers, and the scales and column sums of the weights."""
    weights: list[LayerWeights] = []
    scales: list[Tensor] = []
    now = layout()
    for modules in layers:
        fields: list[Any] = []
        for path in LEAVES:
            own = modules[path]._parameters
            weight = own.get("weight")
            if path in LINEARS:
                weight, scale, column_sum, _, _ = modules[path].weight_now(now)
                scales += (scale, column_sum)
            fields += ((weight,), (own.get("bias"),))
        weights.append(LayerWeights(*fields))
    return weights, tuple(scales)
