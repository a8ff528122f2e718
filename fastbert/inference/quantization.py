"""Quantize the linear layers of an encoder to int8, for inference on the CPU."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fastbert.modules import BertPreTrainedModel
from fastbert.modules.class_name import class_name
from fastbert.modules.layer import BertLayer
from fastbert.modules.linear import Linear
from fastbert.modules.plain import deviation
from fastbert.modules.prepared_call import forget_prepared_calls
from fastbert.modules.quantized_linear import QuantizedLinear

# These linear layers take nine tenths of a layer's time and hold nearly all of its weights.
LAYERS = ("attention.self.qkv", "attention.output.dense", "intermediate.dense", "output.dense")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize(model: BertPreTrainedModel, *, inplace: bool = False) -> BertPreTrainedModel:
    """Quantize the linear layers of a model's encoder to int8, for inference on the CPU.

    The weights become int8 with a scale for each output channel. The activations are quantized in
    every call, and each row has its own scale and zero point, so that a sequence gives the same
    result in any batch. Attention, layer norms, embeddings, the pooler and heads stay in the dtype
    of the model, because they take little time or compute the results that the caller reads.

    The ``state_dict()`` of the result has int8 weights under their old names, and fp32 scales. It
    can be loaded into another quantized model. ``save_pretrained`` refuses the result.

    Args:
        model: A model of fastbert in fp32, bf16 or fp16, on the CPU and in eval mode.
        inplace: Whether `model` itself is changed. Each weight is then freed when its quantized
            form replaces it.

    Returns:
        A copy of `model` that shares no parameter with `model`; or, with `inplace`, `model` itself.
        No parameter of the result requires a gradient.

    Raises:
        TypeError: If `model` is not a model of fastbert, or if a linear layer of its encoder was
            replaced or has hooks.
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
    if not isinstance(model, BertPreTrainedModel):
        raise TypeError(f"quantize: got {class_name(model)}, allowed: a model of fastbert")
    places = _places(model)
    _check(model, places)
    if not inplace:
        # The weights of the linear layers are about to be replaced and need no copy.
        weights = {id(linear.weight): linear.weight for _, _, linear in places}
        model = copy.deepcopy(model, weights)
        places = _places(model)
    forget_prepared_calls(model)
    while places:
        parent, name, linear = places.pop()
        quantised = QuantizedLinear.of(linear)
        quantised.eval()
        quantised.set_backend(model.backend)
        setattr(parent, name, quantised)
        del linear
    # The copy shares weights with the original until here, so gradients are switched off last.
    return model.requires_grad_(False)


def _places(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return the parent, the name in the parent, and the module of each layer in ``LAYERS``.

    Raises:
        TypeError: If a linear layer was replaced or has hooks.
        ValueError: If a linear layer is already quantized.
    """
    places = []
    for prefix, layer in model.named_modules():
        if not isinstance(layer, BertLayer):
            continue
        for path in LAYERS:
            parent, _, name = path.rpartition(".")
            around = layer.get_submodule(parent)
            linear = getattr(around, name)
            if isinstance(linear, QuantizedLinear):
                raise ValueError("quantize: got a quantized model, allowed: floating weights")
            problem = deviation(linear, Linear if type(linear) is Linear else nn.Linear)
            if problem is not None:
                raise TypeError(f"quantize: {prefix}.{path} {problem}, allowed: a plain Linear")
            places.append((around, name, linear))
    return places


def _check(model: nn.Module, places: list[tuple[nn.Module, str, nn.Linear]]) -> None:
    if model.training:
        raise ValueError("quantize: got a model in training mode, allowed: model.eval()")
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise ValueError(f"quantize: {name}: got a tensor on {parameter.device}, allowed: cpu")
    for around, name, linear in places:
        where = f"quantize: {name} of {type(around).__name__}"
        if linear.weight.dtype not in DTYPES:
            allowed = ", ".join(map(str, DTYPES))
            raise ValueError(f"{where}: got {linear.weight.dtype}, allowed: {allowed}")
        if not bool(torch.isfinite(linear.weight).all()):
            raise ValueError(f"{where}: got weights that are not finite")
