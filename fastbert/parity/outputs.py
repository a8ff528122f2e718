"""The fields of an output, and which of their elements an accelerated model means to reproduce.

In an accelerated encoder, hidden states at padding are 0 on purpose. An element of an output that
changes when a stock encoder gives other hidden states at padding reads padding, and the two models
cannot agree on it. Every other element must agree, and so must its gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Two results in float64 that differ by less than this share of the largest element are equal: the
# order of sums may differ between two runs.
NOISE = 1e-10


def fields(output: Any, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the floating-point fields of an output by name, each as one flat tensor.

    Args:
        output: A tensor, or mappings, dataclasses, tuples and lists of tensors.
        given: The batch, whose tensors an output may repeat; these are left out.

    Returns:
        Tensors of one dimension. A tuple in a mapping, such as ``hidden_states``, is one field.
    """
    inputs = {id(value) for value in given.values()}
    found: dict[str, list[Tensor]] = {}
    for name, tensor in _tensors("", output):
        if tensor.is_floating_point() and id(tensor) not in inputs:
            found.setdefault(name or "output", []).append(tensor.flatten())
    return {name: torch.cat(parts) for name, parts in found.items()}


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
    found = {}
    for name, x in before.items():
        scale = x.abs().max() if x.numel() else 0.0
        # NaN equals nothing, so that an element that is not finite counts as changed.
        found[name] = (x - after[name]).abs() <= NOISE * scale
    return found


class DisturbedPadding:
    """A context in which stock encoders give random numbers at padding.

    Zeros would not do: a hidden state that is 0 by itself would seem not to be read, while its
    gradient flows.

    The encoders get a ``forward`` of their own in the context, because some callers call
    ``forward`` and run no hooks. The attribute ``seen`` is whether an encoder got padding.

    Args:
        module: A stock module.
        encoders: Names of the encoders in `module`.
    """

    def __init__(self, module: nn.Module, encoders: Iterable[str]) -> None:
        """Prepare the context."""
        self.encoders = [module.get_submodule(name) for name in encoders]
        self.seen = False
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> DisturbedPadding:
        """Replace the ``forward`` of each encoder."""
        for encoder in self.encoders:
            own = encoder.__dict__.get("forward")
            encoder.__dict__["forward"] = self._disturbing(encoder, encoder.forward)
            self._undo.callback(_give_back, encoder, own)
        return self

    def __exit__(self, *_: Any) -> None:
        """Undo the changes."""
        self._undo.close()

    def _disturbing(self, encoder: nn.Module, stock: Any) -> Any:
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
            with _disturbed_pooler(encoder, exists):
                output = stock(*args, **kwargs)
            if isinstance(output, tuple):
                return tuple(_disturbed(part, exists) for part in output)
            for name, part in list(output.items()):
                output[name] = _disturbed(part, exists)
            return output

        return forward


def _give_back(encoder: nn.Module, own: Any) -> None:
    del encoder.__dict__["forward"]
    if own is not None:
        encoder.__dict__["forward"] = own


@contextlib.contextmanager
def _disturbed_pooler(encoder: nn.Module, exists: Tensor) -> Iterator[None]:
    """Let the pooler of an encoder read random numbers at padding inside the block."""
    pooler = getattr(encoder, "pooler", None)
    if not isinstance(pooler, nn.Module):
        yield
        return

    def disturb(module: nn.Module, args: Any) -> Any:
        states, *others = args
        # The pooler reads all states, or those of the first position.
        read = exists if states.dim() == 3 else exists[:, 0]
        return (states.where(read[..., None], torch.randn_like(states)), *others)

    handle = pooler.register_forward_pre_hook(disturb)
    try:
        yield
    finally:
        handle.remove()


def _disturbed(value: Any, exists: Tensor) -> Any:
    """Return states or attention weights with random numbers at padding; other values stay."""
    if isinstance(value, (tuple, list)):
        return type(value)(_disturbed(part, exists) for part in value)
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 4:  # Weights of shape (B, heads, L, L); a query is a row.
        return value.where(exists[:, None, :, None], torch.randn_like(value))
    if value.dim() == 3:
        return value.where(exists[..., None], torch.randn_like(value))
    return value
