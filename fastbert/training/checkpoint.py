"""Checkpoint folders that are either whole or absent."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

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
            "allowed: another folder, or overwrite=True"
        )


def save_checkpoint(folder: Path, model: BertForPreTraining, tokenizer: WordPieceTokenizer) -> None:
    """Writes weights, configuration and tokenizer in the Hugging Face layout to ``folder``.

    Everything is written to a sibling first and renamed last, so a run that dies half-way leaves
    the checkpoint that was there before, or none.
    """
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        model.save_pretrained(partial)
        tokenizer.save(partial, max_length=model.config.max_position_embeddings)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    except BaseException:
        # A full folder cannot be renamed over, so for an instant there is none: put the old one
        # back.
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
