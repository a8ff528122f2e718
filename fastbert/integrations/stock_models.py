"""Models and tokenizers of transformers that benchmarks and comparisons use beside fastbert.

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

from fastbert import json_file
from fastbert.config import BertConfig
from fastbert.io import sentence_transformers_folder


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
        config: Sizes and settings of the model.
        weights: The state dict. Its names must be exactly the names of the model's parameters.
        path: The attention implementation, ``"eager"`` or ``"sdpa"``.
        dtype: The dtype of the parameters.
        device: The device of the parameters.

    Returns:
        The model.
    """
    import transformers

    stock_config = transformers.BertConfig(**config.to_dict())
    stock_config._attn_implementation = path
    model = transformers.BertModel(stock_config)
    model.load_state_dict(dict(weights), strict=True)
    return model.to(device=device, dtype=dtype).eval()


def untrained_pretraining_model(config: BertConfig, path: str) -> nn.Module:
    """Build a BertForPreTraining of transformers with random weights.

    Args:
        config: Sizes and settings of the model.
        path: The attention implementation, as in `encoder`.

    Returns:
        The model.
    """
    import transformers

    stock_config = transformers.BertConfig(**config.to_dict())
    stock_config._attn_implementation = path
    return transformers.BertForPreTraining(stock_config)


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


def whole_model(folder: Path) -> tuple[Any, Any]:
    """Load the model of a folder with its head, with the library that wrote the folder.

    Args:
        folder: Folder of transformers or of sentence-transformers.

    Returns:
        The model in eval mode, and its tokenizer. The tokenizer is None for a model of
        sentence-transformers, which contains a tokenizer, and for a folder without a tokenizer.

    Raises:
        ValueError: If the library cannot load the folder.
        ImportError: If the library is not installed.
        OSError: If a file cannot be read.
    """
    try:
        with quiet():
            if sentence_transformers_folder.is_one(folder):
                return _sentence_model(folder), None
            return _model_with_head(folder), _tokenizer_or_none(folder)
    except (OSError, ImportError):
        raise
    except Exception as error:
        # A damaged folder makes the libraries raise any kind of error.
        raise ValueError(f"MODEL: {folder} cannot be loaded: {error}") from error


def _sentence_model(folder: Path) -> Any:
    import sentence_transformers

    settings = folder / sentence_transformers_folder.SETTINGS
    kind = json_file.read(settings).get("model_type") if settings.exists() else None
    known = getattr(sentence_transformers, kind or "SentenceTransformer", None)
    if not isinstance(known, type):
        raise ValueError(f"model_type: got {kind!r}, allowed: a class of sentence-transformers")
    return known(str(folder), device="cpu").eval()


def _model_with_head(folder: Path) -> Any:
    return _class_of(_config_of(folder)).from_pretrained(folder).eval()


def _config_of(folder: Path) -> Any:
    import transformers

    return transformers.AutoConfig.from_pretrained(folder)


def _class_of(config: Any) -> Any:
    """Return the class of transformers that a config names, otherwise the class ``AutoModel``."""
    import transformers

    kinds = [getattr(transformers, name, None) for name in config.architectures or []]
    return next((each for each in kinds if each is not None), transformers.AutoModel)


def why_not_accelerated(folder: Path) -> str | None:
    """Return why ``fastbert.accelerate`` cannot run a model with the config in `folder`, or None.

    The model is built on the meta device, without weights.

    Args:
        folder: Folder with the ``config.json`` of the model.

    Returns:
        The reason, or None if ``fastbert.accelerate`` can run the encoder of the model.
    """
    if not installed():
        return "transformers is not installed"
    import transformers

    from fastbert.integrations.accelerate import accelerate, obstacles

    try:
        with quiet(), torch.device("meta"):
            config = _config_of(folder)
            kind = _class_of(config)
            named = issubclass(kind, transformers.PreTrainedModel)
            model = kind(config) if named else kind.from_config(config)
        return next(filter(None, obstacles(accelerate(model.eval())).values()), None)
    except (ValueError, ImportError, OSError, KeyError) as error:
        return str(error).removeprefix("accelerate: ")


def _tokenizer_or_none(folder: Path) -> Any:
    has_one = any(
        (folder / name).exists() for name in ("tokenizer.json", "vocab.txt", "vocab.json")
    )
    return tokenizer(folder) if has_one else None


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
