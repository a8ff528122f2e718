"""The fields of an output, and which of their elements an accelerated model has to reproduce.

In an accelerated encoder, hidden states at padding are 0 on purpose. An element of an output reads
padding if the element changes when a stock encoder gives other hidden states at padding. The two
models cannot agree on such an element. They must agree on every other element and its gradients.

Zeros at padding do not reveal every element that reads padding: a hidden state or a parameter that
is 0 by chance hides the reading, although its gradient is not 0. Random numbers alone do not reveal
every element either: a maximum over positions may read padding for one state and not for another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Two results in float64 count as equal if they differ by at most this share of the largest element,
# because the order of sums may differ between two runs.
NOISE = 1e-10


def fields(output: Any, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the floating-point fields of an output by name, each as one flat tensor.

    Args:
        output: A tensor, or mappings, dataclasses, tuples and lists of tensors.
        given: The batch. If the output repeats a tensor of the batch, this tensor is left out.

    Returns:
        Tensors of one dimension. A tuple in a mapping, such as ``hidden_states``, is one field.
    """
    inputs = {id(value) for value in given.values()}
    tensors: dict[str, list[Tensor]] = {}
    for name, tensor in _tensors("", output):
        if tensor.is_floating_point() and id(tensor) not in inputs:
            tensors.setdefault(name or "output", []).append(tensor.flatten())
    return {name: torch.cat(parts) for name, parts in tensors.items()}


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in `value` with the name of its field."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors(f"{name}.{key}" if name else str(key), part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        yield from _tensors(name, parts)
    elif isinstance(value, (tuple, list)):
        for number, part in enumerate(value):
            yield from _tensors(name or f"output[{number}]", part)


def unchanged(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return which elements of each field are equal in two results in float64.

    Args:
        before: The fields of a result.
        after: The same fields of another result.

    Returns:
        Bool tensors of the shapes of the fields.
    """
    copies = {}
    for name, x in before.items():
        scale = x.abs().max() if x.numel() else 0.0
        # NaN equals nothing, so that an element that is not finite counts as changed.
        copies[name] = (x - after[name]).abs() <= NOISE * scale
    return copies


@contextlib.contextmanager
def random_parameters(module: nn.Module) -> Iterator[None]:
    """Add random numbers to all parameters of a module inside the block."""
    before = [(parameter, parameter.data) for parameter in module.parameters()]
    for parameter, own in before:
        scale = own.square().mean().sqrt() if own.numel() else 0.0
        parameter.data = own + (0.1 * scale + 1e-3) * torch.randn_like(own)
    try:
        yield
    finally:
        for parameter, own in before:
            parameter.data = own


class ChangedPadding:
    """A context in which stock encoders give other numbers at padding.

    The encoders get a separate ``forward`` in the context, because some callers call ``forward``
    directly, which runs no hooks. The attribute ``seen`` tells whether an encoder got padding.

    Args:
        module: A stock module.
        encoders: Names of the encoders in `module`.
        numbers: Function that returns the other numbers, in the shape of the tensor that it gets.
    """

    def __init__(
        self, module: nn.Module, encoders: Iterable[str], numbers: Callable[[Tensor], Tensor]
    ) -> None:
        """Prepare the context."""
        self.encoders = [module.get_submodule(name) for name in encoders]
        self.numbers, self.seen = numbers, False
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> ChangedPadding:
        """Replace the ``forward`` of each encoder."""
        for encoder in self.encoders:
            own = encoder.__dict__.get("forward")
            encoder.__dict__["forward"] = self._changing(encoder, encoder.forward)
            self._undo.callback(_give_back, encoder, own)
        return self

    def __exit__(self, *_: Any) -> None:
        """Undo the changes."""
        self._undo.close()

    def _changing(self, encoder: nn.Module, stock: Any) -> Any:
        @functools.wraps(stock)
        def forward(*args: Any, **kwargs: Any) -> Any:
            mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
            if mask is None:
                return stock(*args, **kwargs)
            if mask.dim() != 2:
                raise ValueError(
                    f"attention_mask: got {mask.dim()} dimensions, allowed: 2, because with others "
                    "the padding of a batch is not known"
                )
            exists = mask.bool()
            self.seen |= not bool(exists.all())
            with _changed_pooler(encoder, exists, self.numbers):
                output = stock(*args, **kwargs)
            if isinstance(output, tuple):
                return tuple(_changed(part, exists, self.numbers) for part in output)
            for name, part in list(output.items()):
                output[name] = _changed(part, exists, self.numbers)
            return output

        return forward


def _give_back(encoder: nn.Module, own: Any) -> None:
    del encoder.__dict__["forward"]
    if own is not None:
        encoder.__dict__["forward"] = own


@contextlib.contextmanager
def _changed_pooler(
    encoder: nn.Module, exists: Tensor, numbers: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Let the pooler of an encoder read other numbers at padding inside the block."""
    pooler = getattr(encoder, "pooler", None)
    if not isinstance(pooler, nn.Module):
        yield
        return

    def change(module: nn.Module, args: Any) -> Any:
        states, *others = args
        # The pooler reads all states, or only the states of the first position.
        read = exists if states.dim() == 3 else exists[:, 0]
        return (states.where(read[..., None], numbers(states)), *others)

    handle = pooler.register_forward_pre_hook(change)
    try:
        yield
    finally:
        handle.remove()


def _changed(value: Any, exists: Tensor, numbers: Callable[[Tensor], Tensor]) -> Any:
    """Return states or attention weights with other numbers at padding, else `value` itself."""
    if isinstance(value, (tuple, list)):
        return type(value)(_changed(part, exists, numbers) for part in value)
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 4:  # Weights of shape (B, heads, L, L); a query is a row.
        return value.where(exists[:, None, :, None], numbers(value))
    if value.dim() == 3:
        return value.where(exists[..., None], numbers(value))
    return value
