"""Checkpoint folders that are either whole or absent."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from fastbert.io import commit

if TYPE_CHECKING:
    from fastbert.data import WordPieceTokenizer
    from fastbert.modules import BertForPreTraining

CHECKPOINT = "model"


def refuse_existing(output: Path, *, overwrite: bool) -> None:
    """Raises ValueError when ``output`` is a file, or holds a checkpoint not to be overwritten."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"output: {output} is a file, allowed: a folder, or a name not taken")
    if (output / CHECKPOINT).exists() and not overwrite:
        raise ValueError(
            f"output: {output} holds a checkpoint already, "
            "allowed: another folder, or overwrite=True (--overwrite), which replaces it"
        )


def save_checkpoint(folder: Path, model: BertForPreTraining, tokenizer: WordPieceTokenizer) -> None:
    """Writes weights, configuration and tokenizer in the Hugging Face layout to ``folder``.

    All files are replaced by one commit (``fastbert.io.commit``), so a run that dies at any moment
    leaves the whole checkpoint that was there before, or the whole new one. Files that the new
    checkpoint does not have are deleted afterwards. Raises OSError when a file cannot be written;
    the folder then holds what it held before.
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
