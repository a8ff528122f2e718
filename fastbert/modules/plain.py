"""Whether a module is the plain one of its class, so that its parameters may be used directly."""

from __future__ import annotations

from torch import nn


class Joined(nn.Module):
    """Stands for the linear layers ``parts``, their outputs side by side."""

    parts: nn.ModuleList


def deviation(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Return how ``module`` differs from a plain ``kind``, in words; None when it does not.

    A module of another class (an adapter, a quantized layer, a parametrization, a shard), one with
    hooks and one with a ``forward`` of its own must be called; the parameters of any other may be
    used without calling it.
    """
    if isinstance(module, Joined):
        return next(filter(None, (deviation(part, nn.Linear) for part in module.parts)), None)
    if type(module) is not kind:
        return f"is a {type(module).__module__}.{type(module).__qualname__}"
    if module._forward_hooks or module._forward_pre_hooks:
        return "has forward hooks"
    return "has a forward of its own" if "forward" in module.__dict__ else None
