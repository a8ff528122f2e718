"""How an operator is declared: schema, implementation and fake in one call, autograd in a second
one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastbert.ops import packed_weights

LIBRARY = torch.library.Library("fastbert", "DEF")
# What runs for each operator, by name, once autograd and autocast have had their say.
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast acts on the public function's arguments, never again on what an implementation
    calls.
    """

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        device = next(a.device.type for a in arguments if isinstance(a, Tensor))
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return function(*arguments)
        with torch.amp.autocast(device, enabled=False):
            return function(*arguments)

    return run


def operator(
    schema: str, forward: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Defines ``fastbert::<schema>`` and returns it; arguments without defaults, in schema
    order.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    IMPLEMENTATIONS[name] = _without_autocast(forward)
    LIBRARY.impl(name, IMPLEMENTATIONS[name], "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastbert::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.fastbert, name).default


def differentiable(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """Registers the gradient of ``fastbert::<name>``.

    Gradients of outputs that have none, such as statistics, arrive as None: autograd would launch a
    kernel for each to fill it with zeros.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        setup_context(ctx, inputs, output)

    @functools.wraps(backward)
    def gradient(ctx: Any, *gradients: Tensor | None) -> Any:
        if not torch.compiler.is_compiling():
            packed_weights.note_backward()
        return backward(ctx, *gradients)

    torch.library.register_autograd(f"fastbert::{name}", gradient, setup_context=setup, lib=LIBRARY)


def once_differentiable(name: str) -> None:
    """Makes a second derivative through the backward operator ``fastbert::<name>`` a clear
    error.
    """

    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(
            f"fastbert::{name} has no derivative: for double backward call the function of "
            "the same name in fastbert.reference"
        )

    differentiable(name, backward, lambda ctx, inputs, output: None)
