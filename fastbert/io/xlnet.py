"""Checkpoints of XLNet in the format of transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fastbert.io import checkpoint
from fastbert.xlnet_config import XLNetConfig

PREFIX = "transformer."
BIAS = "lm_loss.bias"


def read(path_or_hub_id: str | os.PathLike[str]) -> tuple[checkpoint.Stored, XLNetConfig]:
    """Read a checkpoint of any model of the family.

    Args:
        path_or_hub_id: Folder, or hub id if there is no such folder.

    Returns:
        The checkpoint and its configuration.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If the checkpoint is damaged or describes another model.
    """
    stored = checkpoint.read(path_or_hub_id)
    with checkpoint.naming_config(stored.folder):
        return stored, XLNetConfig.from_dict(stored.content)


def fit(
    stored: checkpoint.Stored, expected: Mapping[str, Tensor], tied: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by the names of a model.

    The weights of heads that the model does not have are left out.

    Args:
        stored: The checkpoint, of a model with or without a head.
        expected: The state dict of the model, which may be on the meta device.
        tied: Map from the second names of tied parameters to their first names.

    Returns:
        The tensors, without the second names of tied parameters.

    Raises:
        ValueError: If a weight is missing, unknown or has a wrong shape or dtype.
    """
    has_prefix = any(name.startswith(PREFIX) for name in stored.tensors)
    before, after = PREFIX if has_prefix else "", PREFIX if BIAS in expected else ""
    tensors = {
        after + name.removeprefix(before): tensor
        for name, tensor in stored.tensors.items()
        if name.startswith(before)
    }
    if BIAS in expected and BIAS in stored.tensors:
        tensors[BIAS] = stored.tensors[BIAS]
    missing = expected.keys() - tensors.keys() - tied.keys()
    checkpoint.check_names(stored.folder, missing, tensors.keys() - expected.keys())
    checkpoint.check_shapes(stored.folder, tensors, dict(expected))
    return tensors


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
