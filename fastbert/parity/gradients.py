"""The gradients of a random linear functional of an output, by kind of parameter."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

FACTOR = 3.0
REASON = "a rounding early in the backward pass affects every later gradient"
# The names of key projections → the names of query projections. The gradient of a key's bias is 0
# except for rounding, because a softmax does not change if one number is added to all logits. The
# gradients of the biases of key and query are therefore judged together.
KEYS = {
    r"\bkey\b": "query",
    r"\bk_lin\b": "q_lin",
    r"\battn\.k\b": "attn.q",
    r"\bk_proj\b": "q_proj",
}


def kinds(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the names of parameters, so that the same parameter of all layers is judged together.

    Args:
        names: Names of parameters.

    Returns:
        The names by kind. In a kind, ``*`` stands for the number of a layer, and the bias of a key
        has the kind of the query's bias.

    Examples:
        >>> from fastbert.parity.gradients import kinds
        >>> kinds(["layer.0.query.bias", "layer.0.key.bias", "layer.1.key.bias"])
        {'layer.*.query.bias': ['layer.0.query.bias', 'layer.0.key.bias', 'layer.1.key.bias']}
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        kind = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)
        if kind.endswith("bias"):
            for key, query in KEYS.items():
                kind = re.sub(key, query, kind)
        groups.setdefault(kind, []).append(name)
    return groups


def directions(exact: Mapping[str, Tensor], comparable: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Draw a random gradient for each field, which is 0 at the elements that are not compared.

    The numbers are the same for every tested dtype.

    Args:
        exact: The fields in float64.
        comparable: Bool masks of the fields, True at the elements that are compared.

    Returns:
        Numbers that bf16 represents, on the devices of the fields.
    """
    drawn = {}
    for name, x in exact.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        numbers = torch.randn(x.shape, generator=generator).bfloat16().to(x)
        drawn[name] = numbers * comparable[name]
    return drawn


def without_jumps(drawn: Mapping[str, Tensor], *outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Set the gradient of a field to 0 where the field is 0 in some outputs and not in others.

    A ReLU without anything after it, as in SPLADE, makes the field 0 there. Its derivative jumps at
    0, so that a rounding decides whether the gradient is 0. A few elements with another decision
    would hide every other error.

    Args:
        drawn: The gradient of each field, as from `directions`.
        outputs: The fields of the outputs of several models.

    Returns:
        New gradients.
    """
    return {
        name: numbers * (sum((out[name] != 0).int() for out in outputs) % len(outputs) == 0)
        for name, numbers in drawn.items()
    }


def gradients(
    side: nn.Module, out: Mapping[str, Tensor], drawn: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradients of a linear functional of the fields with respect to the parameters.

    Args:
        side: The model.
        out: The fields of an output of `side`, which autograd has recorded.
        drawn: The gradient of each field; only fields with a gradient in `drawn` count.

    Returns:
        The gradient of each parameter that requires a gradient and on which a field depends.
    """
    named = {name: p for name, p in side.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(
        [out[name] for name in drawn],
        list(named.values()),
        [numbers.to(out[name].dtype) for name, numbers in drawn.items()],
        allow_unused=True,
    )
    pairs = zip(named, grads, strict=True)
    return {name: (g.to_dense() if g.is_sparse else g) for name, g in pairs if g is not None}


def joined(tensors: Mapping[str, Tensor], groups: Mapping[str, list[str]]) -> dict[str, Tensor]:
    """Return the gradients of each kind of parameter as one flat tensor."""
    return {
        kind: torch.cat([tensors[name].flatten() for name in names])
        for kind, names in groups.items()
    }
