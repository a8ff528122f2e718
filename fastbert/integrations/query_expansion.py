"""Compute the mask tokens of queries that a ``MultiVectorEncoder`` reads, as in ColBERT.

The query expansion of sentence-transformers appends mask tokens to a query. With ``attend=False``,
the attention mask of these tokens is 0: no token attends to them, but the score of the query reads
their hidden states. An accelerated encoder computes no hidden states where the mask is 0.
`fast_class` makes a subclass of the module ``Transformer`` of sentence-transformers that asks the
encoder for the hidden states at all positions of such queries. Documents are still computed without
padding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from fastbert.integrations.sparse_encoder import TRANSFORMER
from fastbert.integrations.twin_cache import stock_class
from fastbert.integrations.wrapper_class import is_wrapper, path_of, wrapper_class

MULTI_VECTOR = "sentence_transformers.multi_vector_encoder.model.MultiVectorEncoder"
# The argument with which an accelerated encoder computes the hidden states at all positions.
COMPUTES_PADDING = "computes_padding"
# Encoders whose hidden states at padding have rules of their own: the embedding reads the mask, or
# the mask hides the whole row of a position.
OWN_RULES = ("DebertaModel", "DebertaV2Model", "EsmModel", "XLNetModel")


def readers_of_padding(outer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules in `outer` that may read hidden states where the mask is 0.

    They are each ``Transformer`` in a ``MultiVectorEncoder``, whose query expansion can be set at
    any time, and each ``Transformer`` that has a query expansion.

    Yields:
        The path in `outer` and the module.
    """
    several = [m for m in outer.modules() if _is_a(m, MULTI_VECTOR)]
    inside = {id(module) for each in several for module in each.modules()}
    for path, module in outer.named_modules():
        if _is_a(module, TRANSFORMER) and (id(module) in inside or _expansion(module)):
            yield path, module


def refusal(outer: nn.Module) -> str:
    """Return which module in `outer` reads states that fastbert cannot compute, or ``""``."""
    for path, module in readers_of_padding(outer):
        if _expansion(module) and not _expansion(module).get("attend"):
            problem = _problem(module)
            if problem:
                return f"{path}.{problem}".lstrip(".")
    return ""


@functools.cache
def fast_class(kind: Any) -> Any:
    """Return the subclass of `kind` that asks an accelerated encoder for all hidden states.

    Args:
        kind: The class ``Transformer`` of sentence-transformers or a subclass of it.
    """

    @functools.wraps(kind.forward)
    def forward(self: Any, features: dict[str, Any], **kwargs: Any) -> Any:
        if is_wrapper(self) and _reads_padding(self, features):
            problem = _problem(self)
            if problem:
                raise ValueError(problem)
            kwargs[COMPUTES_PADDING] = True
        return kind.forward(self, features, **kwargs)

    return wrapper_class(kind, forward, (fast_class, kind))


def _is_a(module: nn.Module, name: str) -> bool:
    return any(path_of(kind) == name for kind in type(module).__mro__)


def _expansion(transformer: Any) -> Any:
    return getattr(transformer, "query_expansion", None)


def _reads_padding(transformer: Any, features: dict[str, Any]) -> bool:
    """Return whether a call reads positions that an accelerated encoder leaves out."""
    if features.get("query_expansion_positions") is None:
        return False
    attends = bool((_expansion(transformer) or {}).get("attend"))
    return not attends and any(
        hasattr(type(module), "fastbert_restores") for module in transformer.modules()
    )


def _problem(transformer: Any) -> str:
    """Return why the encoder of a ``Transformer`` cannot compute all hidden states, or ``""``."""
    kind = type(transformer.model)
    stock = stock_class(kind)
    # The argument is known to reach an encoder that ``Transformer`` calls itself.
    reached = stock is not None and getattr(kind, "fastbert_restores", kind) is stock
    if reached and stock.__name__ not in OWN_RULES:
        return ""
    return (
        "query_expansion: got attend=False, with which hidden states are read where the mask is "
        f"0, allowed with a {kind.__name__}: attend=True or no query expansion"
    )
