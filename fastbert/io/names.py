"""The names of BERT's weights in state dicts and checkpoints, as transformers writes them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

# The parts of the fused projection, in the order of its rows.
QKV = ("query", "key", "value")
BODY_PREFIX = "bert."
# First parts of names, without BODY_PREFIX.
ENCODER = ("embeddings", "encoder")
BODY = (*ENCODER, "pooler")
HEADS = ("cls", "classifier", "qa_outputs")
# Buffers that older versions of transformers stored.
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")

_MODERN = {"gamma": "weight", "beta": "bias"}


def modernise(name: str) -> str:
    """``LayerNorm.gamma`` and ``.beta``, TensorFlow's names in the first checkpoints → ``weight``,
    ``bias``."""
    head, dot, last = name.rpartition(".")
    return head + dot + _MODERN.get(last, last)


def for_model(tensors: Mapping[str, Tensor], body_prefix: str) -> dict[str, Tensor]:
    """A checkpoint's tensors as named in a model whose body is ``body_prefix``, "bert." or ""."""
    named = {}
    for name, tensor in tensors.items():
        bare = modernise(name).removeprefix(BODY_PREFIX)
        if bare not in BUFFERS:
            named[body_prefix + bare if part(bare) in BODY else bare] = tensor
    return named


def part(name: str) -> str:
    """The part of the model that a weight belongs to: embeddings, encoder, pooler, cls, …"""
    return name.removeprefix(BODY_PREFIX).partition(".")[0]
