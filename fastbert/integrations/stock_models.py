"""Models and tokenizers of transformers, as the other side of benchmarks and comparisons.

The package transformers is optional. Call `installed` before any other function.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.config import BertConfig


def installed() -> bool:
    """Return whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def version() -> str:
    """Return the version of transformers."""
    import transformers

    return transformers.__version__


def encoder(
    config: BertConfig, weights: Mapping[str, Tensor], path: str, dtype: torch.dtype, device: str
) -> nn.Module:
    """Build a BertModel of transformers, in eval mode.

    Args:
        config: The sizes of the model.
        weights: The state dict of the model; every name must match.
        path: The attention implementation, ``"eager"`` or ``"sdpa"``.
        dtype: The dtype of the parameters.
        device: The device of the parameters.

    Returns:
        The model.
    """
    import transformers

    theirs = transformers.BertConfig(**config.to_dict())
    theirs._attn_implementation = path
    model = transformers.BertModel(theirs)
    model.load_state_dict(dict(weights), strict=True)
    return model.to(device=device, dtype=dtype).eval()


def untrained_pretraining_model(config: BertConfig, path: str) -> nn.Module:
    """Build a BertForPreTraining of transformers with random weights.

    Args:
        config: The sizes of the model.
        path: The attention implementation, as in `encoder`.

    Returns:
        The model.
    """
    import transformers

    theirs = transformers.BertConfig(**config.to_dict())
    theirs._attn_implementation = path
    return transformers.BertForPreTraining(theirs)


def pretraining_model(checkpoint: Path) -> Any:
    """Load a BertForPreTraining of transformers in fp32 and eval mode, with eager attention.

    Args:
        checkpoint: Folder of the checkpoint.

    Returns:
        The model.
    """
    import transformers

    with quiet():
        model = transformers.BertForPreTraining.from_pretrained(
            checkpoint, attn_implementation="eager", dtype=torch.float32
        )
    return model.eval()


def tokenizer(checkpoint: Path) -> Any:
    """Load the tokenizer of a folder with transformers' ``AutoTokenizer``.

    Args:
        checkpoint: Folder of the checkpoint.

    Returns:
        The tokenizer.
    """
    import transformers

    return transformers.AutoTokenizer.from_pretrained(checkpoint)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bars and the loading reports of transformers inside the block."""
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
