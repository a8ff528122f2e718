"""transformers' own models and tokenizers, to be timed and compared with.

transformers is optional: ask ``installed`` first.
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
    return importlib.util.find_spec("transformers") is not None


def version() -> str:
    import transformers

    return transformers.__version__


def encoder(
    config: BertConfig, weights: Mapping[str, Tensor], path: str, dtype: torch.dtype, device: str
) -> nn.Module:
    """transformers' BertModel with these weights; ``path`` is its attention: "eager" or "sdpa"."""
    import transformers

    theirs = transformers.BertConfig(**config.to_dict())
    theirs._attn_implementation = path
    model = transformers.BertModel(theirs)
    model.load_state_dict(dict(weights), strict=True)
    return model.to(device=device, dtype=dtype).eval()


def untrained_pretraining_model(config: BertConfig, path: str) -> nn.Module:
    """transformers' BertForPreTraining with fresh weights; ``path`` as in ``encoder``."""
    import transformers

    theirs = transformers.BertConfig(**config.to_dict())
    theirs._attn_implementation = path
    return transformers.BertForPreTraining(theirs)


def pretraining_model(checkpoint: Path) -> Any:
    """transformers' BertForPreTraining of a folder, in fp32 with its plain attention."""
    import transformers

    with quiet():
        model = transformers.BertForPreTraining.from_pretrained(
            checkpoint, attn_implementation="eager", dtype=torch.float32
        )
    return model.eval()


def tokenizer(checkpoint: Path) -> Any:
    """What ``AutoTokenizer`` makes of a folder."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(checkpoint)


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and reports of loading."""
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
