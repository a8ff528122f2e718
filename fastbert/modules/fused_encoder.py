"""Whether the layers of an encoder can be one call of ``ops.encoder``; if not, why.

The one place where that is decided, anew for every call of the encoder: hooks, adapters and
backends come and go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastbert.activations import PLAIN
from fastbert.modules.attention import BertAttention, BertSelfAttention, BertSelfOutput
from fastbert.modules.feed_forward import BertIntermediate, BertOutput
from fastbert.modules.joined_linear import WHOLE, JoinedLinear
from fastbert.modules.layer import BertLayer, PreNormLayer
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.linear import Linear
from fastbert.modules.operation import OperationModule
from fastbert.modules.plain import touched
from fastbert.modules.quantized_linear import QuantizedLinear
from fastbert.ops.backend import Choice, Request
from fastbert.ops.encoder import INT8_OPERATIONS, OPERATIONS, choose
from fastbert.ops.int8_linear import layout

# The modules inside a module of each class, or QuantizedLinear for a linear one; anything else in a
# layer is not known here.
CHILDREN: dict[type[nn.Module], tuple[tuple[str, type[nn.Module]], ...]] = {
    BertLayer: (
        ("attention", BertAttention),
        ("intermediate", BertIntermediate),
        ("output", BertOutput),
    ),
    BertAttention: (("self", BertSelfAttention), ("output", BertSelfOutput)),
    BertSelfAttention: (("qkv", Linear),),
    BertSelfOutput: (("dense", Linear), ("LayerNorm", LayerNorm)),
    BertIntermediate: (("dense", nn.Linear),),
    BertOutput: (("dense", nn.Linear), ("LayerNorm", LayerNorm)),
}


class Step(NamedTuple):
    """A module of a layer: its place among those found so far is its number; 0 is the layer."""

    parent: int
    name: str
    kind: type[nn.Module]
    path: str


def _steps(kind: type[nn.Module], number: int, path: str, found: list[int]) -> Iterator[Step]:
    for name, child in CHILDREN.get(kind, ()):
        found[0] += 1
        yield Step(number, name, child, f"{path}.{name}")
        yield from _steps(child, found[0], f"{path}.{name}", found)


STEPS = tuple(_steps(BertLayer, 0, "", [0]))
KINDS = (BertLayer, *(step.kind for step in STEPS))


def _numbers(kinds: tuple[type[nn.Module], ...], of: tuple[Any, ...] = KINDS) -> tuple[int, ...]:
    return tuple(i for i, kind in enumerate(of) if issubclass(kind, kinds))


NORMS, LINEARS = _numbers((LayerNorm,)), _numbers((nn.Linear,))
# The modules that ask for a backend.
ASKING = _numbers((OperationModule,))
INT8_ASKING = tuple(sorted({*ASKING, *LINEARS}))
# In this order weights and biases are what ``ops.encoder`` takes.
LEAVES = tuple(sorted(NORMS + LINEARS))
(ATTENTION,), (OUTPUT,) = _numbers((BertSelfAttention,)), _numbers((BertOutput,))
DROPPING = (ATTENTION, OUTPUT, *NORMS)


class Stack(NamedTuple):
    """What ``ops.encoder`` is told about the layers."""

    parameters: list[Tensor]
    scales: list[Tensor]
    dtype: torch.dtype
    heads: int
    eps: float
    activation: str


def stack(
    layers: Sequence[nn.Module],
    device: str,
    dtype: torch.dtype,
    wants_gradient: bool,
    rows: int = WHOLE,
) -> Stack | Choice:
    """The stack of ``layers`` for rows of ``dtype`` on a ``device`` ("cpu", …), or who serves them
    one by one (backend "": up to each operation), and why. ``wants_gradient``: whether that of the
    rows is asked for. ``rows``: how many there are (see ``JoinedLinear.parameters_now``)."""
    if torch.compiler.is_compiling():
        return _one_by_one("torch.compile traces")
    if device != "cpu":
        return _one_by_one(f"the rows are on {device}")
    if torch.is_grad_enabled() and (
        wants_gradient or any(p.requires_grad for layer in layers for p in layer.parameters())
    ):
        return _one_by_one("a gradient is wanted")
    if _has_any_global_hook():
        return _one_by_one("there are hooks on all modules")
    found: list[list[Any]] = []
    for number, layer in enumerate(layers):
        inside = _inside(layer)
        if isinstance(inside, str):
            return _one_by_one(f"layer.{number}{inside}")
        found.append(inside)
    return _stack(found, device, dtype, rows)


def _inside(layer: Any) -> list[Any] | str:
    """The modules of a layer by number; or how one of them, named first, is in the way."""
    if type(layer) is PreNormLayer:
        return " has its layer norms before attention and feed-forward"
    problem = touched(layer, BertLayer)
    if problem is not None:
        return f" {problem}"
    found = [layer]
    for parent, name, kind, path in STEPS:
        module = found[parent]._modules.get(name)
        quantised = type(module) is QuantizedLinear and issubclass(kind, nn.Linear)
        problem = touched(module, QuantizedLinear if quantised else kind)
        if problem is not None:
            return f"{path} {problem}"
        found.append(module)
    return found


def _stack(found: list[list[Any]], device: str, dtype: torch.dtype, rows: int) -> Stack | Choice:
    kinds = {type(modules[i]) is QuantizedLinear for modules in found for i in LINEARS}
    if len(kinds) > 1:
        return _one_by_one("some linear layers are int8, others are not")
    int8 = kinds == {True}
    if int8 and any(modules[i].training for modules in found for i in LINEARS):
        return _one_by_one("a quantised layer is in training mode")
    parameters, scales = _int8_tensors(found) if int8 else (_tensors(found, rows), [])
    if set(map(type, parameters)) != ({nn.Parameter, Tensor} if int8 else {nn.Parameter}):
        return _one_by_one("a parameter is missing or of a class of its own")
    allowed, of_rows = {dtype}, dtype
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        allowed = {dtype, torch.float32}
    dtypes = {of_rows} if int8 else {p.dtype for p in _weights_of_products(parameters)}
    if not dtypes <= allowed:
        return _one_by_one(f"{'rows' if int8 else 'weights'} are {dtypes}, the products {dtype}")
    if any(m[i].training and m[i].dropout_p > 0.0 for m in found for i in DROPPING):
        return _one_by_one("there is dropout in training")
    if any(m[ATTENTION].rotary is not None or m[ATTENTION].window is not None for m in found):
        return _one_by_one("attention has rotary positions or a window")
    heads = {modules[ATTENTION].heads for modules in found}
    activations = {modules[OUTPUT].activation for modules in found}
    eps = {modules[i].eps for modules in found for i in NORMS}
    asking = INT8_ASKING if int8 else ASKING
    requests = {(m[i].operation, m[i].backend) for m in found for i in asking}
    requested = dict(requests)
    if max(map(len, (heads, activations, eps))) > 1 or len(requested) < len(requests):
        return _one_by_one("the layers differ in heads, eps, activation or backend")
    activation = activations.pop()
    if activation not in PLAIN:
        return _one_by_one(f"the activation is {activation}")
    request = Request(device, dtype, activation=activation)
    choice = choose(request, requested, INT8_OPERATIONS if int8 else OPERATIONS)
    if choice.backend != "cpu":
        return choice
    return Stack(parameters, scales, dtype, heads.pop(), eps.pop(), activation)


def _tensors(found: list[list[Any]], rows: int) -> list[Any]:
    return [p for modules in found for i in LEAVES for p in _parameters(modules[i], rows)]


def _int8_tensors(found: list[list[Any]]) -> tuple[list[Any], list[Tensor]]:
    parameters: list[Any] = []
    scales: list[Tensor] = []
    now = layout()
    for modules in found:
        for i in LEAVES:
            own = modules[i]._parameters
            if i in LINEARS:
                packed, scale, column_sum, _, _ = modules[i].weight_now(now)
                parameters += (packed, own.get("bias"))
                scales += (scale, column_sum)
            else:
                parameters += (own.get("weight"), own.get("bias"))
    return parameters, scales


def _parameters(leaf: nn.Module, rows: int) -> tuple[Tensor | None, Tensor | None]:
    if isinstance(leaf, JoinedLinear):
        return leaf.parameters_now(rows)
    own = leaf._parameters
    return own.get("weight"), own.get("bias")


def _weights_of_products(parameters: list[Tensor]) -> Iterator[Tensor]:
    weights = [i for i, leaf in enumerate(LEAVES) if leaf in LINEARS]
    for layer in range(0, len(parameters), 2 * len(LEAVES)):
        yield from (parameters[layer + 2 * i] for i in weights)


def _one_by_one(reason: str) -> Choice:
    return Choice("", f"layer by layer: {reason}")
