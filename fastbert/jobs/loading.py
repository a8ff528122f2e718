"""Load the models of jobs, and refuse a model that would have random weights in its head."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from fastbert.modules.pretrained import BertPreTrainedModel

Model = TypeVar("Model", bound="BertPreTrainedModel")


def refuse_backend(backend: str | None, model_type: str) -> None:
    """Refuse a backend for a model whose head is a class of transformers.

    Args:
        backend: The backend that the caller asked for, or None.
        model_type: The model type in ``config.json``.

    Raises:
        ValueError: If `backend` is not None.
    """
    if backend is not None:
        raise ValueError(
            f"--backend: got {backend!r}, allowed: none for a head of {model_type}, which is "
            "transformers' (the environment variable FASTBERT_BACKEND is a preference)"
        )


def load_whole(
    kind: type[Model], folder: Path, backend: str | None, parts: tuple[str, ...], head: str
) -> Model:
    """Load a model, and refuse it if some of its weights would be random.

    The results of a model with a random head have no meaning. Other warnings are passed on.

    Args:
        kind: The class of the model.
        folder: Folder of the checkpoint.
        backend: Backend of the model; None lets each operation choose.
        parts: Prefixes of the names of the weights that must be in the checkpoint.
        head: Name of the head that has the weights of `parts`, for the message of the error.

    Returns:
        The model.

    Raises:
        ValueError: If a weight of `parts` is missing in the checkpoint.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = kind.from_pretrained(folder, backend=backend)
    for warning in caught:
        if any(part in str(warning.message) for part in parts):
            raise ValueError(f"MODEL: the {head} is incomplete: {warning.message}")
        warnings.warn(warning.message, stacklevel=2)
    return model
