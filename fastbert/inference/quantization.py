"""Quantize the linear layers of an encoder to int8, for inference on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from fastbert.modules import BertPreTrainedModel
from fastbert.modules.class_name import class_name
from fastbert.modules.layer import BertLayer
from fastbert.modules.linear import Linear
from fastbert.modules.plain import deviation
from fastbert.modules.prepared_call import forget_prepared_calls
from fastbert.modules.quantized_linear import QuantizedLinear

# These linear layers take nine tenths of the time of a `BertLayer`, and have nearly all of its
# weights.
LAYERS = ("attention.self.qkv", "attention.output.dense", "intermediate.dense", "output.dense")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Model = TypeVar("Model", bound=nn.Module)
# The parent, the name in the parent, and the module of each linear layer.
Linears = list[tuple[nn.Module, str, Any]]


def quantize(model: Model, *, inplace: bool = False) -> Model:
    """Quantize the linear layers of a model's encoder to int8, for inference on the CPU.

    The weights become int8 with a scale for each output channel. The activations are quantized in
    every call, and each row has its own scale and zero point, so that a sequence gives the same
    result in any batch. Attention, layer norms, embeddings, the pooler and heads stay in the dtype
    of the model, because they take little time or compute the results that the caller reads.

    The ``state_dict()`` of the result has int8 weights under their old names, and fp32 scales. It
    can be loaded into another quantized model. ``save_pretrained`` of transformers and ``save`` of
    sentence-transformers write an accelerated and quantized model; see
    ``fastbert.integrations.quantized_models`` for its format. ``save_pretrained`` of a model of
    fastbert refuses a quantized model.

    Args:
        model: A model of fastbert, or a module that `fastbert.accelerate` has accelerated, such as
            a ``SentenceTransformer``; in fp32, bf16 or fp16, on the CPU and in eval mode.
        inplace: Whether `model` itself is changed. Each weight is then freed when its quantized
            form replaces it.

    Returns:
        A copy of `model` that shares no parameter with `model`; or, with `inplace`, `model` itself.
        No parameter of the result requires a gradient.

    Raises:
        TypeError: If `model` is neither a model of fastbert nor an accelerated module, or if a
            linear layer of its encoder was replaced or has hooks.
        ValueError: If `model` is in training mode, is not on the CPU, is already quantized, has
            weights in a dtype other than fp32, bf16 and fp16, or has weights that are not finite.

    Examples:
        >>> from fastbert import BertConfig, BertModel, quantize
        >>> config = BertConfig(
        ...     vocab_size=100, hidden_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, intermediate_size=64,
        ... )
        >>> model = quantize(BertModel(config).eval())
        >>> model.state_dict()["encoder.layer.0.output.dense.weight"].dtype
        torch.int8
    """
    if isinstance(model, BertPreTrainedModel):
        return quantize_linears(model, _linears, inplace=inplace)
    for module in model.modules() if isinstance(model, nn.Module) else ():
        # The class of an accelerated encoder has a function that quantizes a module around it.
        by_host = getattr(type(module), "fastbert_quantizes", None)
        if by_host is not None:
            return by_host(model, inplace=inplace)
    raise TypeError(
        f"quantize: got {class_name(model)}, allowed: a model of fastbert, or a module that "
        "fastbert.accelerate has accelerated"
    )


def quantize_linears(model: Model, linears: Callable[[Model], Linears], *, inplace: bool) -> Model:
    """Replace linear layers of a model by layers with int8 weights.

    Args:
        model: The model.
        linears: Function that returns the linear layers of `model` or of a copy of `model`.
        inplace: Whether `model` itself is changed.

    Returns:
        The quantized model; see `quantize`, also for the errors.
    """
    places = linears(model)
    _check(model, places)
    if not inplace:
        # The weights of the linear layers are about to be replaced and need no copy.
        weights = {id(linear.weight): linear.weight for _, _, linear in places}
        model = copy.deepcopy(model, weights)
        places = linears(model)
    forget_prepared_calls(model)
    backend = model.backend if isinstance(model, BertPreTrainedModel) else None
    while places:
        parent, name, linear = places.pop()
        quantised = QuantizedLinear.of(linear)
        quantised.eval()
        quantised.set_backend(backend)
        setattr(parent, name, quantised)
        del linear
    # The copy shares weights with the original until here, so gradients are switched off last.
    return model.requires_grad_(False)


def _linears(model: nn.Module) -> Linears:
    """Return the linear layers in ``LAYERS`` of every layer of a model of fastbert."""
    layers = [module for module in model.modules() if isinstance(module, BertLayer)]
    return [linear_at(layer, path) for layer in layers for path in LAYERS]


def linear_at(root: nn.Module, path: str) -> tuple[nn.Module, str, Any]:
    """Return the parent, the name in the parent, and the module at a path of `root`."""
    parent, _, name = path.rpartition(".")
    around = root.get_submodule(parent)
    return around, name, getattr(around, name)


def _check(model: nn.Module, places: Linears) -> None:
    paths = {id(module): path for path, module in model.named_modules()}
    for _, _, linear in places:
        if isinstance(linear, QuantizedLinear):
            raise ValueError("quantize: got a quantized model, allowed: floating weights")
        problem = deviation(linear, Linear if type(linear) is Linear else nn.Linear)
        if problem is not None:
            raise TypeError(f"quantize: {paths[id(linear)]} {problem}, allowed: a plain Linear")
    # A SentenceTransformer is created in training mode around an encoder in eval mode.
    if any(linear.training for _, _, linear in places):
        raise ValueError("quantize: got a model in training mode, allowed: model.eval()")
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise ValueError(f"quantize: {name}: got a tensor on {parameter.device}, allowed: cpu")
    for _, _, linear in places:
        where = f"quantize: {paths[id(linear)]}"
        if linear.weight.dtype not in DTYPES:
            allowed = ", ".join(map(str, DTYPES))
            raise ValueError(f"{where}: got {linear.weight.dtype}, allowed: {allowed}")
        if not bool(torch.isfinite(linear.weight).all()):
            raise ValueError(f"{where}: got weights that are not finite")
