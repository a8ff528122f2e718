"""The names of BERT's weights in state dicts and checkpoints, which transformers also uses."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

# The parts of the fused query-key-value projection, in the order of its rows.
QKV = ("query", "key", "value")
BODY_PREFIX = "bert."
# The first part of a weight's name, after BODY_PREFIX is removed, is a name in BODY or in HEADS.
ENCODER = ("embeddings", "encoder")
BODY = (*ENCODER, "pooler")
HEADS = ("cls", "classifier", "qa_outputs")
# Older versions of transformers stored these buffers.
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")

_MODERN = {"gamma": "weight", "beta": "bias"}


def modernise(name: str) -> str:
    """Replace the early names ``gamma`` and ``beta`` with ``weight`` and ``bias``."""
    head, dot, last = name.rpartition(".")
    return head + dot + _MODERN.get(last, last)


def for_model(tensors: Mapping[str, Tensor], body_prefix: str) -> dict[str, Tensor]:
    """Rename the tensors of a checkpoint to their names in a model, and leave out `BUFFERS`.

    Args:
        tensors: The tensors by their names in the checkpoint.
        body_prefix: Prefix of the names of the encoder and the pooler in the model, ``"bert."`` or
            ``""``.

    Returns:
        The tensors by their new names.
    """
    named = {}
    for name, tensor in tensors.items():
        bare = modernise(name).removeprefix(BODY_PREFIX)
        if bare not in BUFFERS:
            named[body_prefix + bare if part(bare) in BODY else bare] = tensor
    return named


def part(name: str) -> str:
    """Return the part of the model to which a weight belongs, such as ``embeddings`` or ``cls``."""
    return name.removeprefix(BODY_PREFIX).partition(".")[0]
