"""The decision whether one call runs all layers of an encoder, or each layer, and the reason.

Only this module decides. The decision is made for every call of the encoder, because hooks,
adapters and backends can change between calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastbert.activations import PLAIN
from fastbert.modules.attention import BertAttention, BertSelfAttention, BertSelfOutput
from fastbert.modules.feed_forward import BertIntermediate, BertOutput
from fastbert.modules.joined_linear import JoinedLinear
from fastbert.modules.layer import BertLayer, PreNormLayer
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.linear import Linear
from fastbert.modules.operation import OperationModule
from fastbert.modules.plain import deviation, has_backward_hooks
from fastbert.modules.positions import Rotary
from fastbert.modules.quantized_linear import QuantizedLinear
from fastbert.ops.backend import LOW_PRECISION, ORDER, Choice, Request
from fastbert.ops.encoder import (
    INT8_OPERATIONS,
    OF_PRODUCTS,
    ONE_CALL,
    OPERATIONS,
    PARAMETERS,
    choose,
)
from fastbert.ops.gpu_times import MANY_ROWS, rows_class
from fastbert.ops.int8_linear import layout
from fastbert.ops.register import is_watched

# The table has the path of each module of a layer and the class that the module must have. A
# QuantizedLinear may replace any linear layer. Linear layers and layer norms are in the order in
# which ``ops.encoder`` takes their weights and biases.
ATTENTION, OUTPUT = "attention.self", "output"
QKV, INNER = "attention.self.qkv", "intermediate.dense"
MODULES: tuple[tuple[str, type[nn.Module]], ...] = (
    ("attention", BertAttention),
    (ATTENTION, BertSelfAttention),
    (QKV, Linear),
    ("attention.output", BertSelfOutput),
    ("attention.output.dense", Linear),
    ("attention.output.LayerNorm", LayerNorm),
    ("intermediate", BertIntermediate),
    (INNER, nn.Linear),
    (OUTPUT, BertOutput),
    ("output.dense", nn.Linear),
    ("output.LayerNorm", LayerNorm),
)
# Each row adds the path of the parent and the name in the parent; "" is the layer.
STEPS = tuple((path, *path.rpartition(".")[::2], kind) for path, kind in MODULES)


def _paths(*kinds: type[nn.Module]) -> tuple[str, ...]:
    return tuple(path for path, kind in MODULES if issubclass(kind, kinds))


NORMS, LINEARS, LEAVES = _paths(LayerNorm), _paths(nn.Linear), _paths(LayerNorm, nn.Linear)
# These modules ask for a backend.
ASKING, INT8_ASKING = _paths(OperationModule), _paths(OperationModule, nn.Linear)
DROPPING = (ATTENTION, OUTPUT, *NORMS)
# The dictionary maps paths to the modules of a layer.
Modules = dict[str, Any]


class FusedCall(NamedTuple):
    """The arguments with which ``ops.encoder`` runs all layers as one call.

    Attributes:
        parameters: Weights and biases of all layers, in the order of ``ops.encoder``.
        scales: Scales and column sums of int8 weights; empty for other weights.
        dtype: Dtype of the products.
        projections: Number of linear layers that compute q, k and v.
        inner_projections: Number of linear layers that compute the first product of the
            feed-forward.
        heads: Number of attention heads.
        eps: Term that is added to the variance in layer norms.
        activation: Name of the activation.
        backend: Backend of the call, ``"cpu"`` or ``"triton"``.
        requested: Requested backend by operation.
        reason: The reason in words for the choice of the backend.
        bases: Base of the rotary positions of each layer, or none.
        windows: Window of each layer, -1 without a limit; or none.
        pre_norm: Whether the layer norms are before attention and feed-forward.
    """

    parameters: list[Tensor]
    scales: list[Tensor]
    dtype: torch.dtype
    projections: int
    inner_projections: int
    heads: int
    eps: float
    activation: str
    backend: str
    requested: dict[str, str | None]
    reason: str
    bases: tuple[float, ...]
    windows: tuple[int, ...]
    pre_norm: bool


class Agreed(NamedTuple):
    """What all layers of one call have in common; see `FusedCall`."""

    heads: int
    eps: float
    activation: str
    backend: str
    requested: dict[str, str | None]
    reason: str


class Beyond(NamedTuple):
    """What layers may have that layers of BERT have not; see `FusedCall`."""

    bases: tuple[float, ...] = ()
    windows: tuple[int, ...] = ()
    pre_norm: bool = False
    rotaries: tuple[Rotary, ...] = ()


NOTHING = Beyond()


class TrainingCall(NamedTuple):
    """The arguments with which ``ops.encoder_layer`` runs the layers in training.

    Attributes:
        parameters: Weights and biases of each layer, in the order of ``ops.encoder``.
        dropouts: Dropout probabilities of each layer: of the attention weights, and before both
            layer norms.
        dtype: Dtype of the products.
        heads: Number of attention heads.
        eps: Term that is added to the variance in layer norms.
        activation: Name of the activation.
        requested: Requested backend by operation.
    """

    parameters: list[list[Tensor]]
    dropouts: list[tuple[float, ...]]
    dtype: torch.dtype
    heads: int
    eps: float
    activation: str
    requested: dict[str, str | None]


def fused_call(
    layers: Sequence[nn.Module],
    device: str,
    dtype: torch.dtype,
    wants_gradient: bool,
    rows: int = MANY_ROWS,
    length: int = 0,
) -> FusedCall | Choice:
    """Return the call that runs all layers at once, or the reason why no call can.

    Args:
        layers: The layers in the order in which they run.
        device: Type of the device that holds the rows, such as ``"cpu"``.
        dtype: Dtype of the rows.
        wants_gradient: Whether a gradient with respect to the rows is wanted.
        rows: Number of rows.
        length: Class of the length of the sequences, for the reason in words.

    Returns:
        A `FusedCall` if the layers can run as one call. Otherwise a `Choice` that names the backend
        and the reason; an empty backend means that each operation chooses for itself.

    Raises:
        ValueError: If a backend that a module asks for cannot serve its operation.
    """
    if torch.compiler.is_compiling():
        return _one_by_one("torch.compile traces")
    if device not in ORDER:
        return _one_by_one(f"the rows are on {device}")
    if torch.is_grad_enabled() and (
        wants_gradient or any(p.requires_grad for layer in layers for p in layer.parameters())
    ):
        return _one_by_one("a gradient is wanted")
    found = _all_inside(layers)
    return found if isinstance(found, Choice) else _arguments(found, device, dtype, rows, length)


def training_call(
    layers: Sequence[nn.Module], device: str, dtype: torch.dtype
) -> TrainingCall | Choice:
    """Return the calls that run each layer as one function of autograd, or the reason against it.

    Args:
        layers: The layers in the order in which they run.
        device: Type of the device that holds the rows, such as ``"cuda"``.
        dtype: Dtype of the rows.

    Returns:
        A `TrainingCall` if the Triton kernels serve every operation of every layer, or CUDA C++ the
        attention and the layer norms. Otherwise a `Choice` as in `fused_call`.

    Raises:
        ValueError: If a backend that a module asks for cannot serve its operation.
    """
    if device not in ORDER or is_watched():
        return _one_by_one(f"the rows are on {device}, or something watches the operators")
    found = _all_inside(layers)
    if isinstance(found, Choice):
        return found
    beyond = _beyond_bert(found)
    if beyond is not None:
        return _one_by_one(beyond)
    if has_backward_hooks(chain.from_iterable(part.values() for part in found)):
        return _one_by_one("a module has backward hooks")
    if {type(modules[path]) for modules in found for path in LINEARS} - {Linear, nn.Linear}:
        return _one_by_one("a linear layer is int8 or joined")
    parameters = _tensors(found)
    if set(map(type, parameters)) != {nn.Parameter}:
        return _one_by_one("a parameter is missing or of a class of its own")
    of_rows, allowed = dtype, {dtype}
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        allowed = set(LOW_PRECISION)
    if of_rows not in (dtype, torch.float32) or not allowed >= {
        p.dtype for p in _of_products(parameters)
    }:
        return _one_by_one(f"rows are {of_rows}, products {dtype}, or parameters of another dtype")
    if any(m[OUTPUT].training and m[OUTPUT].dropout_p > 0.0 for m in found):
        return _one_by_one("there is dropout inside the feed-forward")
    agreed = _agreed(found, ASKING, device, dtype, OPERATIONS, trained=True)
    if isinstance(agreed, Choice):
        return agreed
    if agreed.backend != "triton":
        return _one_by_one(f"the operations are served by {agreed.backend}")
    layers_of = [parameters[i : i + PARAMETERS] for i in range(0, len(parameters), PARAMETERS)]
    dropouts = [
        tuple(m[path].dropout_p if m[path].training else 0.0 for path in (ATTENTION, *NORMS))
        for m in found
    ]
    return TrainingCall(
        layers_of, dropouts, dtype, agreed.heads, agreed.eps, agreed.activation, agreed.requested
    )


def _all_inside(layers: Sequence[nn.Module]) -> list[Modules] | Choice:
    """Return the modules of each layer by path, or the reason why a layer is unsuitable."""
    if _has_any_global_hook():
        return _one_by_one("there are hooks on all modules")
    found: list[Modules] = []
    for number, layer in enumerate(layers):
        inside = _inside(layer)
        if isinstance(inside, str):
            return _one_by_one(f"layer.{number}{inside}")
        found.append(inside)
    return found


def _inside(layer: Any) -> Modules | str:
    """Return the modules of a layer by path, or a message that names an unsuitable module."""
    pre_norm = type(layer) is PreNormLayer
    problem = deviation(layer, PreNormLayer if pre_norm else BertLayer)
    if problem is not None:
        return f" {problem}"
    found: Modules = {"": layer}
    for path, parent, name, kind in STEPS:
        module = found[parent]._modules.get(name)
        if type(module) is QuantizedLinear and issubclass(kind, nn.Linear):
            kind = QuantizedLinear
        elif type(module) is nn.Identity and pre_norm and path == NORMS[0]:
            kind = nn.Identity
        problem = deviation(module, kind)
        if problem is not None:
            return f".{path} {problem}"
        found[path] = module
    rotary = found[ATTENTION].rotary
    problem = None if rotary is None else deviation(rotary, Rotary)
    return found if problem is None else f".{ATTENTION}.rotary {problem}"


def _beyond_bert(found: list[Modules]) -> str | None:
    """Return in words what a layer has that a layer of BERT has not, or None."""
    for number, modules in enumerate(found):
        if type(modules[""]) is PreNormLayer:
            return f"layer.{number} has its layer norms before attention and feed-forward"
        if modules[ATTENTION].rotary is not None or modules[ATTENTION].window is not None:
            return "attention has rotary positions or a window"
        if modules[OUTPUT].activation not in PLAIN:
            return f"the activation is {modules[OUTPUT].activation}"
    return None


def _absent() -> nn.Parameter:
    """Return what stands for an absent parameter among those of a call.

    It is made for each plan, because a tensor of the module would have the device, the dtype and
    the mode of the moment at which this file was imported first.
    """
    with torch.inference_mode(False):
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        return nn.Parameter(nothing, requires_grad=False)


def _arguments(
    found: list[Modules], device: str, dtype: torch.dtype, rows: int, length: int
) -> FusedCall | Choice:
    kinds = {type(modules[path]) for modules in found for path in LINEARS}
    int8 = kinds == {QuantizedLinear}
    if QuantizedLinear in kinds and not int8:
        return _one_by_one("some linear layers are int8, others are not")
    if device != "cpu" and (int8 or JoinedLinear in kinds):
        # Only the CPU's call takes these weights.
        return _one_by_one(f"a linear layer is int8 or joined, and the rows are on {device}")
    if int8 and any(modules[path].training for modules in found for path in LINEARS):
        return _one_by_one("a quantised layer is in training mode")
    projections = {(1, 1)}
    if JoinedLinear in kinds:
        projections = {(_parts_of(modules[QKV]), _parts_of(modules[INNER])) for modules in found}
    if len(projections) > 1:
        return _one_by_one("the layers differ in the number of projections")
    beyond = _beyond_bert(found)
    if beyond is not None and (device != "cpu" or int8):
        return _one_by_one(beyond if device != "cpu" else f"a linear layer is int8, and {beyond}")
    absent = _absent() if device == "cpu" else None
    parameters, scales = _int8_tensors(found) if int8 else (_tensors(found, absent), [])
    if set(map(type, parameters)) != ({nn.Parameter, Tensor} if int8 else {nn.Parameter}):
        return _one_by_one("a parameter is missing or of a class of its own")
    allowed, of_rows = {dtype}, dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        allowed = {dtype, torch.float32}
    counts = projections.pop()
    dtypes = {of_rows} if int8 else {p.dtype for p in _weights_of_products(parameters, *counts)}
    if not dtypes <= allowed:
        return _one_by_one(f"{'rows' if int8 else 'weights'} are {dtypes}, the products {dtype}")
    if any(
        type(m[path]) is not nn.Identity and m[path].training and m[path].dropout_p > 0.0
        for m in found
        for path in DROPPING
    ):
        return _one_by_one("there is dropout in training")
    if type(found[0][""]) is PreNormLayer:
        if any(m[""].training and (m[""].dropout_p or m[""].output_dropout_p) for m in found):
            return _one_by_one("there is dropout in training")
        if dtype != of_rows:
            return _one_by_one("autocast, and the layer norms are before attention")
    asking, operations = (INT8_ASKING, INT8_OPERATIONS) if int8 else (ASKING, OPERATIONS)
    more = NOTHING if beyond is None else _more(found)
    if isinstance(more, Choice):
        return more
    agreed = _agreed(found, asking, device, dtype, operations, rows, length, more)
    if isinstance(agreed, Choice):
        return agreed
    if agreed.backend == "triton" and not (
        dtype == of_rows and all(p.dtype == dtype for p in _of_products(parameters))
    ):
        return _one_by_one(f"rows or parameters of products are not {dtype}")
    return FusedCall(parameters, scales, dtype, counts[0], counts[1], *agreed, *more[:3])


def _agreed(
    found: list[Modules],
    asking: Sequence[str],
    device: str,
    dtype: torch.dtype,
    operations: Sequence[str],
    rows: int = MANY_ROWS,
    length: int = 0,
    more: Beyond = NOTHING,
    *,
    trained: bool = False,
) -> Agreed | Choice:
    """Return what all layers have in common, or the reason why one call cannot run them."""
    heads = {modules[ATTENTION].heads for modules in found}
    activations = {modules[OUTPUT].activation for modules in found}
    # The first layer with norms before attention has an Identity in the place of a norm.
    eps = {m[path].eps for m in found for path in NORMS if type(m[path]) is not nn.Identity}
    requests = {
        (m[path].operation, m[path].backend)
        for m in found
        for path in asking
        if type(m[path]) is not nn.Identity
    }
    if more.rotaries:
        requests |= {(rotary.operation, rotary.backend) for rotary in more.rotaries}
        operations = (*operations, "rotary")
    requested = dict(requests)
    if max(map(len, (heads, activations, eps))) > 1 or len(requested) < len(requests):
        return _one_by_one("the layers differ in heads, eps, activation or backend")
    activation = activations.pop()
    columns = found[0][NORMS[1]].weight.shape[0]
    common = heads.pop()
    request = Request(
        device, dtype, columns // common, ("window",) if more.windows else (), activation,
        columns=columns, length=length, rows=rows_class(rows) if device == "cuda" else 0,
        trained=trained,
    )  # fmt: skip
    choice = choose(request, requested, operations)
    if not choice.reason.startswith(ONE_CALL):
        return choice
    return Agreed(common, eps.pop(), activation, choice.backend, requested, choice.reason)


def _more(found: list[Modules]) -> Beyond | Choice:
    """Return what the layers have beyond BERT, or the reason why one call cannot run them."""
    rotaries = tuple(m[ATTENTION].rotary for m in found if m[ATTENTION].rotary is not None)
    windows = tuple(-1 if m[ATTENTION].window is None else m[ATTENTION].window for m in found)
    kinds = {type(m[""]) for m in found}
    if len(kinds) > 1 or len(rotaries) not in (0, len(found)):
        return _one_by_one("the layers differ in their norms or in rotary positions")
    bases = tuple(rotary.base for rotary in rotaries)
    return Beyond(bases, windows if max(windows) >= 0 else (), PreNormLayer in kinds, rotaries)


def _parts_of(linear: nn.Module) -> int:
    return len(linear.parts) if isinstance(linear, JoinedLinear) else 1


def _tensors(found: list[Modules], absent: Tensor | None = None) -> list[Any]:
    """Return the parameters of all layers, with `absent` where a layer may go without one."""
    # A norm after attention or feed-forward has all its parameters.
    return [
        p
        for modules in found
        for path in LEAVES
        for p in _parameters(
            modules[path],
            absent if path in LINEARS or type(modules[""]) is PreNormLayer else None,
        )
    ]


def _int8_tensors(found: list[Modules]) -> tuple[list[Any], list[Tensor]]:
    parameters: list[Any] = []
    scales: list[Tensor] = []
    now = layout()
    for modules in found:
        for path in LEAVES:
            own = modules[path]._parameters
            if path in LINEARS:
                packed, scale, column_sum, _, _ = modules[path].weight_now(now)
                parameters += (packed, own.get("bias"))
                scales += (scale, column_sum)
            else:
                parameters += (own.get("weight"), own.get("bias"))
    return parameters, scales


def _parameters(leaf: nn.Module, absent: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Return the weights, then the biases, of a module, with `absent` for a bias that is not there.

    An Identity in the place of a norm has neither a weight nor a bias.
    """
    if isinstance(leaf, JoinedLinear):
        weights, biases = leaf.weights_and_biases()
        return (*weights, *(biases or [absent] * len(weights)))
    own = leaf._parameters
    bias = own.get("bias")
    weight = absent if type(leaf) is nn.Identity else own.get("weight")
    return weight, absent if bias is None else bias


def _of_products(parameters: list[Tensor]) -> Iterator[Tensor]:
    """Yield the weights and biases that the products of the Triton backend read."""
    for layer in range(0, len(parameters), PARAMETERS):
        yield from (parameters[layer + i] for i in OF_PRODUCTS)


def _weights_of_products(parameters: list[Tensor], projections: int, inner: int) -> list[Tensor]:
    first = 2 * projections
    second = first + 4
    places = (
        *range(projections), first, *range(second, second + inner), second + 2 * inner,
    )  # fmt: skip
    count = PARAMETERS + 2 * (projections + inner - 2)
    return [parameters[i + j] for i in range(0, len(parameters), count) for j in places]


def _one_by_one(reason: str) -> Choice:
    return Choice("", f"layer by layer: {reason}")
