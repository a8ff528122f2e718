"""Checkpoints of XLNet in the format of transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fastbert.io import checkpoint
from fastbert.xlnet_config import XLNetConfig

PREFIX = "transformer."
WORDS, TIED, BIAS = "transformer.word_embedding.weight", "lm_loss.weight", "lm_loss.bias"


def read(
    path_or_hub_id: str | os.PathLike[str], *, head: bool
) -> tuple[XLNetConfig, dict[str, Tensor]]:
    """Read a checkpoint of any model of the family.

    Args:
        path_or_hub_id: Folder, or hub id if there is no such folder.
        head: Whether the result has the head of language modelling. Without it, the weights of
            heads are left out.

    Returns:
        The configuration; and the tensors by the names of the model, with a prefix if `head`.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If the checkpoint is damaged, describes another model, or lacks the head.
    """
    stored = checkpoint.read(path_or_hub_id)
    with checkpoint.naming_config(stored.folder):
        config = XLNetConfig.from_dict(stored.content)
    tensors = dict(stored.tensors)
    has_prefix = any(name.startswith(PREFIX) for name in tensors)
    if head:
        if BIAS not in tensors:
            raise ValueError(f"{stored.folder}: missing: 1 weights: {BIAS}")
        kept = {n: t for n, t in tensors.items() if n.startswith(PREFIX) or n in (TIED, BIAS)}
        kept.setdefault(TIED, kept[WORDS])
        return config, kept
    if has_prefix:
        tensors = {n.removeprefix(PREFIX): t for n, t in tensors.items() if n.startswith(PREFIX)}
    return config, tensors


def write(
    folder: str | os.PathLike[str],
    config: XLNetConfig,
    tensors: Mapping[str, Tensor],
    architecture: str,
) -> None:
    """Write a checkpoint that transformers opens.

    Args:
        folder: Folder, which is created if it does not exist.
        config: The configuration.
        tensors: The tensors by their names in the checkpoint.
        architecture: Name of the class in transformers.

    Raises:
        ValueError: If `folder` is a file.
        OSError: If a file cannot be written.
    """
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    content = {**config.to_dict(), "architectures": [architecture], "dtype": dtype}
    content.pop("torch_dtype", None)
    checkpoint.write_files(Path(folder), dict(tensors), {checkpoint.CONFIG: content})
