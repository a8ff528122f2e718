"""The condition under which one call runs all layers of the decoder, and the arguments of the call.

The layers run in one call (``ops.decoder_step``) only if every module inside them is a plain
instance of its class (``fastbert.modules.plain``). Otherwise each module runs its own forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastbert.modules.attention import BertSelfOutput
from fastbert.modules.feed_forward import BertIntermediate, BertOutput
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.linear import Linear
from fastbert.modules.operation import OperationModule
from fastbert.modules.plain import deviation
from fastbert.modules.transformer.decoder import TransformerDecoder
from fastbert.modules.transformer.decoder_layer import (
    AttentionBlock,
    CausalSelfAttention,
    CrossAttention,
    DecoderLayer,
    PreNormDecoderLayer,
)
from fastbert.ops.backend import LOW_PRECISION, Request
from fastbert.ops.encoder import choose

# The path of each module of a layer and the class that the module must have. `LEAVES` are the
# modules with the parameters of ``ops.decoder_step``, in the order of its argument `parameters`.
BLOCKS: tuple[tuple[str, type[nn.Module]], ...] = (
    ("attention", AttentionBlock),
    ("attention.self", CausalSelfAttention),
    ("attention.output", BertSelfOutput),
    ("cross_attention", AttentionBlock),
    ("cross_attention.self", CrossAttention),
    ("cross_attention.output", BertSelfOutput),
    ("intermediate", BertIntermediate),
    ("output", BertOutput),
)
LEAVES: tuple[tuple[str, type[nn.Module]], ...] = (
    ("attention.self.qkv", Linear),
    ("attention.output.dense", Linear),
    ("attention.output.LayerNorm", LayerNorm),
    ("cross_attention.self.query", Linear),
    ("cross_attention.output.dense", Linear),
    ("cross_attention.output.LayerNorm", LayerNorm),
    ("intermediate.dense", nn.Linear),
    ("output.dense", nn.Linear),
    ("output.LayerNorm", LayerNorm),
)


class OneCall(NamedTuple):
    """The arguments of ``ops.decoder_step`` that do not change between steps.

    Attributes:
        parameters: The parameters of all layers.
        options: The settings of the layers, by the names of the arguments.
    """

    parameters: list[Tensor]
    options: dict[str, Any]


def one_call(decoder: TransformerDecoder, device: str, dtype: torch.dtype) -> OneCall | str:
    """Return the arguments of the call that runs all layers, or the reason why there is none.

    Args:
        decoder: The decoder.
        device: Type of the device of the rows, such as ``"cpu"``.
        dtype: Dtype of the rows.
    """
    if device != "cpu":
        return f"the rows are on {device}"
    if dtype not in (torch.float32, *LOW_PRECISION):
        return f"the rows are {dtype}"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is active"
    if _has_any_global_hook():
        return "there is a hook for every module"
    parameters: list[Tensor] = []
    settings: set[tuple[Any, ...]] = set()
    requested: set[tuple[str, str | None]] = set()
    for number, layer in enumerate(decoder.layer):
        kind = PreNormDecoderLayer if decoder.final_norm is not None else DecoderLayer
        modules = {"": layer}
        for path, expected in (("", kind), *BLOCKS, *LEAVES):
            try:
                module = layer.get_submodule(path)
            except AttributeError:
                return f"layer.{number} has no {path}"
            problem = deviation(module, expected)
            if problem is not None:
                return f"layer.{number}{'.' if path else ''}{path} {problem}"
            modules[path] = module
        for path, _ in LEAVES:
            parameters += _parameters(modules[path], dtype)
        if any(module.training for module in modules.values()):
            return "a layer is in training mode"
        asking = [m for m in modules.values() if isinstance(m, OperationModule)]
        requested |= {(m.operation, m.backend) for m in asking}
        norms = {m.eps for m in modules.values() if isinstance(m, LayerNorm)}
        heads = {modules[f"{block}.self"].heads for block in ("attention", "cross_attention")}
        settings |= {(eps, count, modules["output"].activation) for eps in norms for count in heads}
    if len(settings) != 1 or len(dict(requested)) != len(requested):
        return "the layers differ in heads, eps, activation or backend"
    held = {parameter.dtype for parameter in parameters}
    if held != {dtype}:
        return f"parameters are {', '.join(sorted(map(str, held)))}, and the rows {dtype}"
    ((eps, count, activation),) = settings
    width = decoder.layer[0].output.dense.weight.shape[0]
    request = Request(device, dtype, width // count, activation=activation, columns=width)
    choice = choose(request, dict(requested))
    if not choice.together or choice.backend != "cpu":
        return choice.reason
    pre_norm = decoder.final_norm is not None
    options = {"heads": count, "pre_norm": pre_norm, "eps": eps, "activation": activation}
    return OneCall(parameters, options)


def _parameters(leaf: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias of a module; a bias that is absent has no elements."""
    weight, bias = leaf.weight, leaf.bias
    return weight, torch.empty(0, dtype=dtype) if bias is None else bias
