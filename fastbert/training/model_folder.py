"""The folder ``model/`` of a training run; this folder is always either complete or absent."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fastbert.io import commit
from fastbert.training import checkpoints

if TYPE_CHECKING:
    from fastbert.modules import BertPreTrainedModel
    from fastbert.modules.transformer import Transformer

CHECKPOINT = "model"


def refuse_existing(output: Path, *, overwrite: bool) -> None:
    """Raise ValueError if `output` is a file, or has a model and no checkpoint to resume from.

    With `overwrite`, a folder with a model is allowed.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"output: {output} is a file, allowed: a folder, or an unused name")
    if (output / CHECKPOINT).exists() and not checkpoints.exists(output) and not overwrite:
        raise ValueError(
            f"output: {output} holds a model already, and no checkpoint to resume from, "
            "allowed: another folder, or overwrite=True (--overwrite), which replaces it"
        )


def has_weights_of(folder: Path, model: BertPreTrainedModel | Transformer) -> bool:
    """Return whether `folder` has a model whose weights all equal the weights of `model`."""
    try:
        actual = checkpoints.weights_of(type(model).from_pretrained(folder))
    except (OSError, ValueError):
        return False
    expected = checkpoints.weights_of(model)
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[name], weight) for name, weight in expected.items()
    )


def save_checkpoint(
    folder: Path,
    model: BertPreTrainedModel | Transformer,
    tokenizer: checkpoints.StoredTokenizer,
) -> None:
    """Write weights, configuration and tokenizer in the layout of Hugging Face.

    One commit replaces all files (``fastbert.io.commit``). If the process dies, the folder has
    either the complete old checkpoint or the complete new one. After the commit, files that are not
    part of the new checkpoint are deleted.

    Args:
        folder: Folder of the checkpoint.
        model: The model.
        tokenizer: The tokenizer of the model.

    Raises:
        OSError: If a file cannot be written; the old files of the folder stay.
    """
    with commit.replacement(folder) as new:
        model.save_pretrained(new)
        tokenizer.save(new, max_length=model.config.max_position_embeddings)
        names = os.listdir(new)
    for path in folder.iterdir():
        if path.name not in names and not path.name.startswith(commit.PREFIX):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
