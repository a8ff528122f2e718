"""int8 weights inside an accelerated model of transformers, and their file format.

`quantize` replaces the linear layers that `fastbert.accelerate` serves by layers with int8 weights.
The model can then be saved and loaded by transformers. The configuration of a saved model has the
entry ``quantization_config``, with the method ``"fastbert"``. After the import of this file,
``from_pretrained`` of transformers and of sentence-transformers knows the method::

    import fastbert.integrations.quantized_models

In a file of weights, a quantized layer has three tensors: ``weight``, int8 of shape ``(1, N, K)``;
``scale``, fp32 of shape ``(N,)``; and ``bias``. The weight of output n is ``scale[n] * weight[0,
n]``. Because of the first dimension, a program that does not know the method refuses the weights,
instead of reading the integers as floating-point weights.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fastbert.config import check
from fastbert.inference.quantization import LAYERS, Linears, linear_at, quantize_linears
from fastbert.integrations.bound_encoder import BOUND, BoundEncoder
from fastbert.io.families import FAMILIES
from fastbert.modules.quantized_linear import QuantizedLinear

METHOD = "fastbert"
VERSION = 1


def quantize(model: nn.Module, encoders: dict[str, Any], *, inplace: bool) -> nn.Module:
    """Quantize the linear layers of the accelerated encoders in a model; see `fastbert.quantize`.

    Args:
        model: A model of transformers, or a module around one.
        encoders: The encoders of fastbert that run in `model`, by path.
        inplace: Whether `model` itself is changed.

    Returns:
        The quantized model.

    Raises:
        ValueError: If an encoder belongs to an encoder–decoder. The names of its layers in the
            configuration would also name layers of the decoder. XLNet is refused too.
    """
    for path, bound in encoders.items():
        kind, allowed = bound.model.config.model_type, ", ".join(FAMILIES)
        check(f"quantize: encoder {path!r}", kind, allowed, kind in FAMILIES)

    def linears(outer: nn.Module) -> Linears:
        return [place for path, bound in encoders.items() for place in _linears(outer, path, bound)]

    names = [name for bound in encoders.values() for name in _names(bound)]
    model = quantize_linears(model, linears, inplace=inplace)
    for path in encoders:
        # The encoder that was bound to the floating-point weights would keep them in memory.
        model.get_submodule(path).__dict__.pop(BOUND, None)
    config = Int8Config(modules=sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names}))
    for outermost in _outermost(model):
        outermost.config.quantization_config = config
        outermost.config._is_quantized = True
        outermost.hf_quantizer = Int8Quantizer(config, pre_quantized=True)
        outermost.quantization_method = METHOD
    return model


def _names(bound: BoundEncoder) -> Iterator[str]:
    """Yield the path in the HF model of each linear layer that is quantized."""
    for leaf in bound.leaves:
        inner = re.fullmatch(r"encoder\.layer\.\d+\.(.+)", leaf.path)
        if inner is not None and inner[1] in LAYERS:
            yield from leaf.paths


def _linears(outer: nn.Module, path: str, bound: BoundEncoder) -> Linears:
    """Return the parent, the name in the parent, and the module of each layer to quantize."""
    hf_model = outer.get_submodule(path)
    # The layers of ALBERT share their modules.
    return [linear_at(hf_model, name) for name in dict.fromkeys(_names(bound))]


def _outermost(module: nn.Module) -> Iterator[Any]:
    """Yield the models of transformers in a module that are not inside another one."""
    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)


# Saving and loading


@register_quantization_config(METHOD)
class Int8Config(QuantizationConfigMixin):
    """The entry ``quantization_config`` of a saved model.

    Args:
        modules: Patterns of the paths of the quantized layers in the encoder.
        version: Version of the format.

    Raises:
        ValueError: If `version` is not the version that this release reads.
    """

    def __init__(self, modules: list[str], version: int = VERSION, **_: Any) -> None:
        """Store the settings; transformers may pass further arguments."""
        if version != VERSION:
            raise ValueError(
                f"quantization_config: version: got {version}, allowed: {VERSION}; a newer release "
                "of fastbert wrote this model"
            )
        self.quant_method: Any = METHOD
        self.modules, self.version = list(modules), version


class Stored(nn.Module):
    """The parameters of a quantized layer as a file of weights has them.

    Args:
        linear: The linear layer; its values are not read.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """Make parameters without values on the device of `linear`."""
        super().__init__()
        like = linear.weight
        self.weight = _constant(like.new_empty((1, *like.shape), dtype=torch.int8))
        self.scale = _constant(like.new_empty(like.shape[0], dtype=torch.float32))
        self.bias = None if linear.bias is None else _constant(torch.empty_like(linear.bias))


def _constant(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


@register_quantizer(METHOD)
class Int8Quantizer(HfQuantizer):
    """The functions that transformers calls when it saves or loads a quantized model."""

    quantization_config: Int8Config

    def is_serializable(self) -> bool:
        """Return True: a quantized model can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """False: int8 weights have no gradient."""
        return False

    def validate_environment(self, *_: Any, **__: Any) -> None:
        """Refuse a model with floating-point weights.

        Raises:
            ValueError: If the weights of the model are not quantized.
        """
        if not self.pre_quantized:
            raise ValueError(
                "quantization_config: got floating-point weights, allowed: a saved model that "
                "fastbert.quantize made. Load the model without this argument, and call "
                "fastbert.quantize(fastbert.accelerate(model))"
            )

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors to save, with the weights in the shape of the file format."""
        state = model.state_dict()
        for name, module in model.named_modules():
            if isinstance(module, QuantizedLinear):
                state[f"{name}.weight"] = state[f"{name}.weight"].unsqueeze(0)
        return state, {}

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        for around, name, linear in list(self._chosen(model, nn.Linear)):
            setattr(around, name, Stored(linear))

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        for around, name, stored in list(self._chosen(model, Stored)):
            made = QuantizedLinear(stored.weight[0].detach(), stored.scale.detach(), stored.bias)
            setattr(around, name, made.eval())
        model.requires_grad_(False)

    def _chosen(self, model: nn.Module, kind: type) -> Iterator[tuple[nn.Module, str, Any]]:
        """Yield the parent, the name in the parent, and the module of each quantized layer."""
        for path, module in model.named_modules():
            fits = (
                fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"*.{pattern}")
                for pattern in self.quantization_config.modules
            )
            if isinstance(module, kind) and any(fits):
                yield linear_at(model, path)

    def _dequantize(self, model: Any, dtype: Any = None) -> NoReturn:
        raise ValueError("dequantize: int8 weights are rounded: load the original model instead")
