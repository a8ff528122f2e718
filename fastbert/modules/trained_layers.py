"""The decision whether the layers of BERT in training run as one function each, on the CPU.

The decision is made for every call of the encoder, because hooks, adapters and backends can change
between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastbert.activations import ACTIVATIONS
from fastbert.modules.attention import BertAttention, BertSelfAttention, BertSelfOutput
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.chosen_rows import ChosenRows, ends_of
from fastbert.modules.dropout import LayerSeeds
from fastbert.modules.feed_forward import BertIntermediate, BertOutput
from fastbert.modules.layer import BertLayer
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.linear import Linear
from fastbert.modules.plain import deviation, has_backward_hooks
from fastbert.ops.backend import Request
from fastbert.ops.encoder import ONE_CALL, OPERATIONS, choose
from fastbert.ops.register import PLAIN, is_watched
from fastbert.ops.trained_layer import Sequences, Settings, trained_layer

# A parameter-holding module of a layer, with the class that it must have.
Part = tuple[nn.Module, type[nn.Module]]


def trained_layers(
    layers: Sequence[nn.Module],
    hidden: Tensor,
    layout: BatchLayout,
    seeds: Sequence[LayerSeeds] | None,
    chosen: ChosenRows | None,
) -> Callable[[int, Tensor], Tensor] | None:
    """Return the function that runs a layer by its number, or None.

    Args:
        layers: The layers in the order in which they run.
        hidden: Rows of shape ``(T, H)`` before the first layer.
        layout: Their division into sequences.
        seeds: Dropout seeds of each layer, or None.
        chosen: The rows that the last layer computes; None computes all rows.

    Returns:
        The function, whose result has only the chosen rows after the last layer. None means that
        the operations must run one by one: on a GPU, in another dtype than fp32, under autocast,
        with hooks, with adapters or frozen parameters, or with more than BERT's attention.
    """
    on_cpu = hidden.device.type == "cpu" and hidden.dtype == torch.float32
    if not on_cpu or type(hidden) not in PLAIN or torch.is_autocast_enabled("cpu"):
        return None
    if is_watched() or _has_any_global_hook() or layout.places is not None:
        return None
    if layout.mask is not None or layout.bias is not None or layout.tokens is not None:
        return None
    found = [_parameters_and_settings(layer) for layer in layers]
    if None in found:
        return None
    plain = [pair for pair in found if pair is not None]
    dropping = [any(settings.dropouts) for _, settings in plain]
    if any(dropping) and (seeds is None or any(None in own[:3] for own in seeds)):
        return None
    ends = layout.cu_seqlens
    longest = layout.length if ends is None else layout.max_seqlen
    every = Sequences(None, ends, ends, longest, longest, layout.batch)
    last = every
    if chosen is not None:
        own = chosen.layout
        last = Sequences(
            chosen.indices, own.cu_seqlens, ends_of(layout), own.max_seqlen, longest, own.batch
        )

    def run(i: int, rows: Tensor) -> Tensor:
        parameters, settings = plain[i]
        drawn = [] if seeds is None or not dropping[i] else seeds[i][:3]
        sequences = last if i == len(plain) - 1 else every
        return trained_layer(rows, parameters, sequences, drawn, settings)

    return run


def _parameters_and_settings(layer: nn.Module) -> tuple[list[Tensor], Settings] | None:
    """Return the parameters, in the order of ``ops.encoder``, and the settings of a plain layer."""
    if deviation(layer, BertLayer) is not None or not isinstance(layer, BertLayer):
        return None
    attention, inner, output = layer.attention, layer.intermediate, layer.output
    outer: list[Part] = [
        (attention, BertAttention),
        (attention.self, BertSelfAttention),
        (attention.output, BertSelfOutput),
        (inner, BertIntermediate),
        (output, BertOutput),
    ]
    if _unusual(outer):
        return None
    norms = (attention.output.LayerNorm, output.LayerNorm)
    holding: list[Part] = [
        (attention.self.qkv, Linear),
        (attention.output.dense, Linear),
        (norms[0], LayerNorm),
        (inner.dense, nn.Linear),
        (output.dense, nn.Linear),
        (norms[1], LayerNorm),
    ]
    if _unusual([(layer, BertLayer), *holding]):
        return None
    own = attention.self
    if own.rotary is not None or own.window is not None or norms[0].eps != norms[1].eps:
        return None
    if ACTIVATIONS[output.activation].gated or (output.training and output.dropout_p > 0.0):
        return None
    parameters = [p for part, _ in holding for p in (part.weight, part.bias)]
    for parameter in parameters:
        if type(parameter) is not nn.Parameter or parameter.dtype != torch.float32:
            return None
        if not parameter.requires_grad or parameter.device.type != "cpu":
            return None
    asking = (own.qkv, own, attention.output.dense, output, *norms)
    columns = own.heads * own.head_dim
    request = Request(
        "cpu", torch.float32, own.head_dim, activation=output.activation, columns=columns
    )
    requests = {(module.operation, module.backend) for module in asking}
    requested = dict(requests)
    if len(requested) < len(requests):
        return None
    choice = choose(request, requested, OPERATIONS)
    if choice.backend != "cpu" or not choice.reason.startswith(ONE_CALL):
        return None
    dropouts = [m.dropout_p if m.training else 0.0 for m in (own, *norms)]
    settings = Settings(
        (dropouts[0], dropouts[1], dropouts[2]), own.heads, norms[0].eps, output.activation
    )
    return parameters, settings


def _unusual(parts: Sequence[Part]) -> bool:
    """Tell whether a module is not a plain instance of its class, or has hooks."""
    for module, kind in parts:
        if deviation(module, kind) is not None:
            return True
    return has_backward_hooks([module for module, _ in parts])
