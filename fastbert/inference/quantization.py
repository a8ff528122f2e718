"""int8 for inference on the CPU: ``fastbert.quantize``."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fastbert.modules import BertPreTrainedModel
from fastbert.modules.layer import BertLayer
from fastbert.modules.linear import Linear
from fastbert.modules.plain import deviation
from fastbert.modules.quantized_linear import QuantizedLinear

# The linear layers of a layer, nine tenths of its time and of the encoder's weights.
LAYERS = ("attention.self.qkv", "attention.output.dense", "intermediate.dense", "output.dense")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize(model: BertPreTrainedModel, *, inplace: bool = False) -> BertPreTrainedModel:
    """``model`` with the linear layers of its encoder in int8, for inference on the CPU.

    Weights become int8 with a scale for each output channel; activations are quantised as they
    come, each row with a scale and a zero of its own, so that a sequence gives the same result in
    any batch. Attention, layer norms, embeddings, pooler and heads stay in the model's dtype, fp32,
    bf16 or fp16: they take little time, or, as logits and scores, are what the caller looks at.

    Returns a copy, as ``torch.ao.quantization.quantize_dynamic`` does; its other parameters are its
    own. With ``inplace`` the model itself, whose weights are freed as they are replaced. No
    parameter of the result wants a gradient. Its ``state_dict()`` holds int8 weights and fp32
    scales under the names of the weights, and loads into another quantised model;
    ``save_pretrained`` refuses.

    Raises TypeError for a model that is not fastbert's, or whose linear layers there were replaced
    or have hooks; ValueError for one in training mode, on another device than the CPU, quantised
    already, or with weights that are not finite.
    """
    if not isinstance(model, BertPreTrainedModel):
        raise TypeError(f"quantize: got {type(model).__name__}, allowed: a model of fastbert")
    places = _places(model)
    _check(model, places)
    if not inplace:
        # What is about to be replaced need not be copied.
        kept = {id(linear.weight): linear.weight for _, _, linear in places}
        model = copy.deepcopy(model, kept)
        places = _places(model)
    while places:
        parent, name, linear = places.pop()
        quantised = QuantizedLinear.of(linear)
        quantised.eval()
        quantised.set_backend(model.backend)
        setattr(parent, name, quantised)
        del linear
    # Not before: until here the copy shares weights with the original.
    return model.requires_grad_(False)


def _places(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """The module around each linear layer, the name there, and the layer. Raises TypeError."""
    places = []
    for prefix, layer in model.named_modules():
        if not isinstance(layer, BertLayer):
            continue
        for path in LAYERS:
            parent, _, name = path.rpartition(".")
            around = layer.get_submodule(parent)
            linear = getattr(around, name)
            if isinstance(linear, QuantizedLinear):
                raise ValueError("quantize: got a quantised model, allowed: one that is not")
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
