"""A check whether a module's parameters may be used directly, without calling the module.

The parameters of a plain module may be used. A plain module is an instance of exactly the expected
class, without forward hooks and without a ``forward`` of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class Joined(nn.Module):
    """A module that computes several linear layers and puts their outputs side by side.

    Attributes:
        parts: The linear layers, in the order of their outputs.
    """

    parts: nn.ModuleList


def deviation(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Return how a module differs from a plain instance of `kind`, or None if it is plain.

    The parameters of a plain module may be used without calling the module. A module of another
    class, such as an adapter, a quantised layer, a parametrization or a shard, must be called. A
    module with forward hooks or with its own ``forward`` must be called as well.

    Args:
        module: The module. If it is a `Joined`, its parts are compared with ``nn.Linear`` instead.
        kind: The class that a plain module must have.

    Returns:
        The difference in words, or None if there is no difference.
    """
    if isinstance(module, Joined):
        return next(filter(None, (deviation(part, nn.Linear) for part in module.parts)), None)
    if type(module) is not kind:
        return f"is a {type(module).__module__}.{type(module).__qualname__}"
    if module._forward_hooks or module._forward_pre_hooks:
        return "has forward hooks"
    return "has a forward of its own" if "forward" in module.__dict__ else None


def has_backward_hooks(modules: Iterable[nn.Module]) -> bool:
    """Return whether one of the modules has hooks for its gradients.

    All modules are checked in one list comprehension, because a training step checks every module
    of every layer. A Python call for each module would be measurably slower.
    """
    return bool([m for m in modules if m._backward_hooks or m._backward_pre_hooks])
