"""Check whether a module in place of a linear layer computes each input row independently.

A module that replaces a linear layer may depend on all rows of its input, as dynamic quantization
does, or on the division of the rows into sequences, as a hook may do. fastbert therefore calls such
a module with an input of shape ``(B, L, H)`` that includes padding, as the model of transformers
does. If `is_row_wise` returns True, each output row depends only on its own input row, so fastbert
leaves out the rows of padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from fastbert.modules.quantized_linear import QuantizedLinear

# Class names of the PEFT adapters that change each row of a linear layer independently.
ADAPTERS = (
    "peft.tuners.lora.layer.Linear",
    "peft.tuners.adalora.layer.SVDLinear",
    "peft.tuners.ia3.layer.Linear",
)
# The classes of the modules inside these adapters.
PARTS = (
    "torch.nn.modules.linear.Linear",
    "torch.nn.modules.linear.Identity",
    "torch.nn.modules.dropout.Dropout",
    "torch.nn.modules.container.ModuleDict",
    "torch.nn.modules.container.ParameterDict",
    "peft.tuners._buffer_dict.BufferDict",
    "peft.tuners.lora.dora.DoraLinearLayer",
)
# Variants of LoRA that compute each row independently. Activated LoRA is not in the list, because
# it depends on positions.
VARIANTS = ("DoraLinearVariant",)
# Python modules whose hooks compute the weight before the layer runs and do not read the input.
WEIGHT_HOOKS = (
    "torch.nn.utils.prune",
    "torch.nn.utils.weight_norm",
    "torch.nn.utils.spectral_norm",
)


def is_row_wise(module: nn.Module) -> bool:
    """Return whether a module that replaces a linear layer computes each row independently.

    Args:
        module: The module that replaces a linear layer, or the linear layer itself.

    Returns:
        True for LoRA, DoRA, AdaLoRA and IA3 of PEFT around an ``nn.Linear``, for the int8 layer of
        fastbert, and for an ``nn.Linear``. The ``nn.Linear`` may have pruning, weight norm,
        spectral norm or a parametrization. The result is False for every other module, and for a
        module with any other forward hook.
    """
    kind = type(module)
    if kind is QuantizedLinear:
        return _is_plain([module])
    if _name(kind) in ADAPTERS:
        inside = [part for part in module.modules() if part is not module]
        variants: Iterable[Any] = getattr(module, "lora_variant", {}).values()
        return (
            _is_plain(module.modules())
            and all(_name(type(part)) in PARTS for part in inside)
            and all(type(variant).__name__ in VARIANTS for variant in variants)
        )
    # A parametrization makes a subclass of the layer, in which the weight is a property.
    return (
        isinstance(module, nn.Linear)
        and kind.forward is nn.Linear.forward
        and "forward" not in module.__dict__
        and not module._forward_hooks
        and all(
            type(hook).__module__ in WEIGHT_HOOKS for hook in module._forward_pre_hooks.values()
        )
        and all(type(p) in (nn.Parameter, type(None)) for p in module._parameters.values())
        and type(module.__dict__.get("weight")) in (Tensor, nn.Parameter, type(None))
    )


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_plain(modules: Iterable[nn.Module]) -> bool:
    """Return whether no module has forward hooks or a ``forward`` in its instance dictionary."""
    return not any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
        for module in modules
    )
