"""The expected class of each module of a layer, and a comparison of a layer with these classes."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from fastbert.modules.attention import BertAttention, BertSelfAttention, BertSelfOutput
from fastbert.modules.feed_forward import BertIntermediate, BertOutput
from fastbert.modules.layer import BertLayer, PreNormLayer
from fastbert.modules.layer_norm import LayerNorm, RMSNorm
from fastbert.modules.linear import Linear
from fastbert.modules.operation import OperationModule
from fastbert.modules.plain import deviation, has_backward_hooks
from fastbert.modules.positions import Rotary
from fastbert.modules.quantized_linear import QuantizedLinear
from fastbert.modules.relative_attention import RelativeSelfAttention

# `MODULES` has the path of each module of a layer and the class that the module must have. A
# QuantizedLinear may replace any linear layer. A RelativeSelfAttention may replace the
# self-attention; its projections of positions may be of any class, because they are called. An
# RMSNorm may replace a LayerNorm in a `PreNormLayer`. Linear layers and norms are in the order of
# the fields of `LayerWeights`.
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
# Each row has a path of `MODULES`, the path of the parent module, the name of the module in the
# parent, and the class of `MODULES`. The path "" is the layer.
STEPS = tuple((path, *path.rpartition(".")[::2], kind) for path, kind in MODULES)


def _paths(*kinds: type[nn.Module]) -> tuple[str, ...]:
    return tuple(path for path, kind in MODULES if issubclass(kind, kinds))


NORMS, LINEARS, LEAVES = _paths(LayerNorm), _paths(nn.Linear), _paths(LayerNorm, nn.Linear)
# The paths of the modules that ask for a backend. `ASKING` is for a layer with floating weights,
# and `INT8_ASKING` for a layer with int8 weights.
ASKING, INT8_ASKING = _paths(OperationModule), _paths(OperationModule, nn.Linear)
DROPPING = (ATTENTION, OUTPUT, *NORMS)
# A layer that computes only chosen rows calls these modules and does not read their parameters, so
# these modules may be of any class.
CALLED_FOR_CHOSEN_ROWS = {"attention.output.dense", INNER, "output.dense"}
# Maps paths to the modules of a layer.
Modules = dict[str, Any]


class Walked(NamedTuple):
    """The result of `walk`.

    Attributes:
        modules: Maps paths to the modules that have the expected class; the layer itself is always
            included.
        problems: Maps paths to the deviations of the other modules, in the order of `MODULES`. The
            modules inside a module that deviates are in neither dictionary.
    """

    modules: Modules
    problems: dict[str, str]


def walk(layer: Any) -> Walked:
    """Find the modules of a layer, and compare each module with its row in `MODULES`.

    Args:
        layer: A layer, or a module that replaces a layer.

    Returns:
        The modules with the expected class, and the deviations of the other modules. The path of
        the layer itself is an empty string.
    """
    pre_norm = type(layer) is PreNormLayer
    modules: Modules = {"": layer}
    problem = deviation(layer, PreNormLayer if pre_norm else BertLayer)
    if problem is not None:
        return Walked(modules, {"": problem})
    problems: dict[str, str] = {}
    for path, parent, name, kind in STEPS:
        if parent in problems or parent not in modules:
            continue
        module = modules[parent]._modules.get(name)
        if type(module) is QuantizedLinear and issubclass(kind, nn.Linear):
            kind = QuantizedLinear
        elif type(module) is nn.Identity and pre_norm and path == NORMS[0]:
            kind = nn.Identity
        elif type(module) is RMSNorm and pre_norm and path in NORMS:
            kind = RMSNorm
        elif type(module) is RelativeSelfAttention and path == ATTENTION:
            kind = RelativeSelfAttention
        problem = deviation(module, kind)
        if problem is None:
            modules[path] = module
        else:
            problems[path] = problem
    rotary = modules[ATTENTION].rotary if ATTENTION in modules else None
    if rotary is not None:
        problem = deviation(rotary, Rotary)
        if problem is not None:
            problems[f"{ATTENTION}.rotary"] = problem
    return Walked(modules, problems)


def is_square(modules: Modules) -> bool:
    """Return whether queries, keys and values have as many columns as the rows of the layer."""
    attention, columns = modules[ATTENTION], modules[NORMS[1]].weight.shape[0]
    equal = attention.key_value_heads == attention.heads
    return equal and attention.heads * attention.head_dim == columns


def may_choose_rows(walked: Walked) -> bool:
    """Return whether a layer can compute only the rows that a head reads."""
    modules, problems = walked
    layer = modules[""]
    if type(layer) is not BertLayer or not problems.keys() <= CALLED_FOR_CHOSEN_ROWS:
        return False
    # A hook of the caller expects all rows.
    inside = list(layer.modules())
    if has_backward_hooks(inside) or any(m._forward_hooks or m._forward_pre_hooks for m in inside):
        return False
    # Dropout masks are indexed by the row among all rows, so that a seed gives the same mask on
    # every device.
    if any(modules[path].training and modules[path].dropout_p > 0.0 for path in DROPPING):
        return False
    attention = modules[ATTENTION]
    int8 = type(modules[QKV]) is QuantizedLinear
    plain = type(attention) is BertSelfAttention and attention.scale is None
    return (
        plain
        and is_square(modules)
        and attention.rotary is None
        and attention.window is None
        and not int8
    )
