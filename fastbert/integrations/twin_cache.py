"""A cache of twins by class and config.

An HF model is a model of transformers. Its twin is a fresh model of the same class and config on
the meta device.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from fastbert.io.families import ACCELERATED

IMPLEMENTATIONS = ("eager", "sdpa")


def _module(model_type: str) -> str:
    name = model_type.replace("-", "_")
    folder = {"data2vec_text": "data2vec"}.get(name, name)
    return f"transformers.models.{folder}.modeling_{name}"


# The name of each encoder class → the name of its Python module.
MODULES = {
    **{family.model: _module(name) for name, family in ACCELERATED.items()},
    "XLNetModel": _module("xlnet"),
}
# The classes of the activation functions that fastbert computes, by their names in a config.
ACTIVATIONS = {
    "gelu": "transformers.activations.GELUActivation",
    "gelu_new": "transformers.activations.NewGELUActivation",
    "gelu_pytorch_tanh": "transformers.activations.GELUTanh",
    "relu": "torch.nn.modules.activation.ReLU",
    "silu": "transformers.activations.SiLUActivation",
    "swish": "torch.nn.modules.activation.SiLU",
}
ACTIVATION_FIELDS = (
    "hidden_act",
    "activation",
    "hidden_activation",
    "activation_function",
    "ff_activation",
    "dense_act_fn",
)
# All layers of these models are alike except for their numbers, so the twin of such a model has one
# layer. ALBERT repeats groups of layers, the layers of ModernBERT have two types of attention, a
# head of ESM has weights for every layer, and the first layer of T5 has a table of distances.
ALIKE = frozenset(MODULES) - {"AlbertModel", "ModernBertModel", "EsmModel", "T5Stack"}
# If the cache has more twins than this number, the least recently used twins are removed.
KEPT = 16


class Twin(NamedTuple):
    """The twin of an HF model, and its properties.

    Attributes:
        model: The fresh model, on the meta device. It has one layer if `alike` is True.
        kinds: The classes of the modules in `model`.
        alike: Whether the one layer of the twin represents every layer of the HF model.
        problem: Why `model` is not the stock model that fastbert implements, or None if it is.
    """

    model: nn.Module
    kinds: frozenset[type]
    alike: bool
    problem: str | None


_twins: OrderedDict[Any, Twin] = OrderedDict()


def twin_of(hf_model: nn.Module) -> Twin | str:
    """Return the twin of an HF model, or the reason why there is none.

    Args:
        hf_model: An encoder of transformers.
    """
    stock = stock_class(type(hf_model))
    config = getattr(hf_model, "config", None)
    if stock is None or config is None:
        return f"got a {type(hf_model).__name__}, allowed: {', '.join(MODULES)}"
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in IMPLEMENTATIONS:
        allowed = ", ".join(IMPLEMENTATIONS)
        return f"config._attn_implementation: got {implementation!r}, allowed: {allowed}"
    options = {}
    if "add_pooling_layer" in inspect.signature(stock.__init__).parameters:
        options["add_pooling_layer"] = hf_model._modules.get("pooler") is not None
    alike = stock.__name__ in ALIKE
    key = (stock, type(config), implementation, *options.values(), repr(vars(config)))
    twin = _twins.pop(key, None)
    if twin is None:
        try:
            twin = _build(stock, config, alike, options)
        except Exception as error:
            return f"config: got {type(error).__name__} ({error}), allowed: a config that builds"
    _twins[key] = twin
    while len(_twins) > KEPT:
        _twins.popitem(last=False)
    return twin


def stock_class(kind: type) -> Any:
    """Return the encoder class of transformers that `kind` is or inherits from, or None if none."""
    for base in kind.__mro__:
        name = MODULES.get(base.__name__)
        # `accelerate` gives a model a class of fastbert with the name and the module of the model's
        # own class. Such a class is skipped.
        if name is None or "fastbert_restores" in vars(base):
            continue
        if base.__module__ == name:
            return base
    return None


def _build(stock: Any, config: Any, alike: bool, options: dict[str, bool]) -> Twin:
    content = copy.deepcopy(config)
    if alike:
        content.num_hidden_layers = 1
    with torch.device("meta"):
        model = stock(content, **options)
    kinds = frozenset(type(module) for module in model.modules())
    return Twin(model, kinds, alike, _activation_problem(model, config))


def _activation_problem(model: nn.Module, config: Any) -> str | None:
    """Return why an activation of the twin is not the one its name denotes, or None if it is."""
    field = next((field for field in ACTIVATION_FIELDS if hasattr(config, field)), None)
    if field is None:  # The activation of ESM is a function in its file.
        return None
    name = getattr(config, field)
    expected = ACTIVATIONS.get(name) if isinstance(name, str) else None
    if expected is None:
        return f"config.{field}: got {name!r}, allowed: {', '.join(ACTIVATIONS)}"
    for path, module in model.named_modules():
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        is_activation = not module._modules and not module._parameters and not module._buffers
        if not is_activation or isinstance(module, (nn.Dropout, nn.Identity, nn.ModuleList)):
            continue
        if path.startswith("pooler"):
            continue
        if kind != expected:
            return f"{path}: got a {kind}, allowed: {expected} for {name!r}"
        function = getattr(vars(module).get("act"), "func", vars(module).get("act"))
        builtin = isinstance(function, BuiltinFunctionType) and function.__name__ == "gelu"
        if "act" in vars(module) and not builtin:
            return f"{path}.act: got {function!r}, allowed: torch's gelu"
    return None
