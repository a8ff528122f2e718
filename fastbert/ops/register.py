"""Functions that declare an operator (schema, fake and implementation) and its gradient.

torch's dispatcher takes 30 to 90 µs for an operator whose implementation and gradient are Python,
which is longer than many kernels run. An `Operator` therefore calls the implementation and the
gradient directly where nothing observes the dispatcher.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastbert.ops import backend as backends
from fastbert.ops.arguments import transformed

LIBRARY = torch.library.Library("fastbert", "DEF")
# The implementation of each operator, below autograd and autocast, by the operator's name.
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}
# The named tuple class of each operator, whose fields are the operator's arguments, by the
# operator's name.
ARGUMENTS: dict[str, Callable[..., Any]] = {}
OPERATORS: dict[str, Operator] = {}
# The types of tensors for which an operator may skip the dispatcher. Other subclasses of Tensor may
# define how operators treat their instances.
TENSOR_TYPES = (Tensor, torch.nn.Parameter)


class Operator:
    """An operator of torch.library that is called by position, with or without the dispatcher.

    The dispatcher is needed if something observes it: ``torch.compile``, a dispatch mode, a
    transform of ``torch.func``, forward-mode AD, ``torch.jit.trace``, a profiler, or an argument
    whose class is a subclass of ``Tensor``. If a gradient is wanted, the dispatcher is also needed
    for an operator that takes lists of tensors or has no gradient. Otherwise the implementation is
    called, through an autograd function if a gradient is wanted. With and without the dispatcher,
    the same code runs and returns the same bits.

    Args:
        overload: The operator ``torch.ops.fastbert.<name>.default``.
        implementation: Implementation below autograd and autocast.
    """

    def __init__(self, overload: Any, implementation: Callable[..., Any]) -> None:
        """Store the operator and its implementation."""
        self.overload = overload
        self.implementation = implementation
        # `differentiable` sets this autograd function.
        self.function: Any = None
        self.takes_lists = any("List[Tensor]" in str(a.type) for a in overload._schema.arguments)

    def __call__(self, *arguments: Any) -> Any:
        """Call the operator with all its arguments by position."""
        if is_watched():
            return self.overload(*arguments)
        given = list(arguments)
        if self.takes_lists:
            for argument in arguments:
                if isinstance(argument, list):
                    given += argument
        wants_gradient = False
        for argument in given:
            if isinstance(argument, Tensor):
                if type(argument) not in TENSOR_TYPES:
                    return self.overload(*arguments)
                wants_gradient = wants_gradient or argument.requires_grad
        if wants_gradient and torch.is_grad_enabled():
            # autograd.Function does not look for tensors in lists.
            if self.function is None or self.takes_lists:
                return self.overload(*arguments)
            return self.function.apply(*arguments)
        return self.implementation(*arguments)


def is_watched() -> bool:
    """Tell whether something, such as a profiler, observes the operators that torch dispatches."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or transformed()
        or torch.autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
    )


def operator(
    schema: str,
    fake: Callable[[Any], Any],
    *,
    table: str | None = None,
    forward: Callable[..., Any] | None = None,
) -> Operator:
    """Define the operator ``fastbert::<schema>`` and return it.

    The operator takes its arguments by position, in the order of the schema and without defaults.

    Args:
        schema: Schema in torch's language. With `table`, its last argument is ``str backend``.
        fake: Function that takes the operator's arguments as one named tuple and returns
            uninitialised results with the right shapes and dtypes.
        table: Name of a table in ``backends.TABLES``. The last argument of the operator names the
            backend whose entry in the table is used. The operator calls ``backward`` of this entry
            if its own name ends in ``_backward``, and otherwise ``forward``, with all other
            arguments.
        forward: Implementation that takes all arguments, for an operator without `table`.

    Returns:
        The operator.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(torch.ops.fastbert, name).default
    arguments = _named_tuple([argument.name for argument in overload._schema.arguments])
    implementation = _dispatch(table, name.endswith("_backward")) if table else forward
    if implementation is None:
        raise TypeError(f"{name}: got neither table nor forward, allowed: one of them")
    ARGUMENTS[name] = arguments
    IMPLEMENTATIONS[name] = without_autocast(implementation)
    LIBRARY.impl(name, IMPLEMENTATIONS[name], "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"fastbert::{name}", lambda *given: fake(arguments(*given)), lib=LIBRARY
    )
    OPERATORS[name] = Operator(overload, IMPLEMENTATIONS[name])
    return OPERATORS[name]


def _named_tuple(fields: list[str]) -> Callable[..., Any]:
    return namedtuple("Arguments", fields)


def _dispatch(table: str, backward: bool) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        row = backends.TABLES[table][arguments[-1]]
        return (row.backward if backward else row.forward)(*arguments[:-1])

    return run


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with autocast turned off inside; the caller has cast the arguments."""

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return function(*arguments)
        device = next(a.device.type for a in arguments if isinstance(a, Tensor))
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return function(*arguments)
        with torch.amp.autocast(device, enabled=False):
            return function(*arguments)

    return run


def differentiable(
    name: str,
    backward: Callable[..., dict[str, Tensor | None]],
    setup_context: Callable[..., None],
) -> None:
    """Register the gradient of the operator ``fastbert::<name>``.

    Args:
        name: Name of the operator.
        backward: Function that takes the context and the gradients of the results, and returns the
            gradients of the arguments by name. An argument that is left out has no gradient.
            In `ctx.needs`, the field of an argument is True if autograd wants the argument's
            gradient; an unwanted gradient may be any tensor. The gradient of a result that nothing
            differentiates, such as a statistic, is None instead of a tensor of zeros. If the
            gradients of all results are None, as after an ``autograd.Function`` that returns None,
            `backward` is not called, and no argument has a gradient.
        setup_context: Function that takes the context, the arguments as one named tuple, and the
            result.
    """
    arguments = ARGUMENTS[name]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        setup_context(ctx, arguments(*inputs), output)

    @functools.wraps(backward)
    def gradient(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.needs = arguments(*ctx.needs_input_grad)
        grads = backward(ctx, *gradients) if any(g is not None for g in gradients) else {}
        needs = ctx.needs._asdict()
        return arguments(*(grads.get(name) if needed else None for name, needed in needs.items()))

    torch.library.register_autograd(f"fastbert::{name}", gradient, setup_context=setup, lib=LIBRARY)
    OPERATORS[name].function = _function(name, setup, gradient)


def _function(name: str, setup: Callable[..., None], gradient: Callable[..., Any]) -> Any:
    """Return the function of autograd that runs an operator without the dispatcher."""
    implementation = IMPLEMENTATIONS[name]

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = implementation(*inputs)
        setup(ctx, inputs, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(gradient)}
    return type(name, (torch.autograd.Function,), members)


def once_differentiable(name: str) -> None:
    """Make a second derivative through the operator ``fastbert::<name>`` raise a clear error."""

    def backward(ctx: Any, *gradients: Tensor | None) -> dict[str, Tensor | None]:
        raise RuntimeError(_no_second_derivative(f"fastbert::{name}"))

    differentiable(name, backward, lambda ctx, inputs, output: None)


def _no_second_derivative(name: str) -> str:
    return (
        f"{name} has no derivative: for a second derivative, as a gradient penalty takes it, call "
        "fastbert.restore on an accelerated model, or the operation in fastbert.reference"
    )


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a second derivative through the backward function of a class raise a clear error.

    If the gradient of every result is None, `backward` is not called, and no input has a gradient.

    Args:
        backward: The ``backward`` of a subclass of ``torch.autograd.Function``.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        with torch.no_grad():
            grads = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return grads
        name = backward.__module__.rpartition(".")[2]
        message = _no_second_derivative(f"fastbert.ops.{name}").encode()
        fail = torch._C._functions.DelayedError(message, len(grads))
        # The result must depend on an input, so that a second derivative reaches the error.
        return fail(*(None if x is None else x.detach().requires_grad_() for x in grads))

    return run


# A backward operator returns a tensor for each argument that can have a gradient. The tensor is
# empty if ``needs`` is False for the argument.


def or_empty(like: Tensor, *gradients: Tensor | None) -> tuple[Tensor, ...]:
    """Return `gradients` with each None replaced by an empty tensor."""
    return tuple(like.new_empty(0) if g is None else g for g in gradients)


def empty_like_needed(
    like: Tensor, needs: Sequence[bool], *inputs: Tensor | None
) -> tuple[Tensor, ...]:
    """Return uninitialised gradients of `inputs` for the fake function of a backward operator.

    A gradient is empty if its value in `needs` is False or its input is None.
    """
    return tuple(
        t.new_empty(t.shape) if need and t is not None else like.new_empty(0)
        for t, need in zip(inputs, needs, strict=True)
    )
