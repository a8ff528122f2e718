"""Models that a job loads, refused where a part of the result would be random."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from fastbert.modules.pretrained import BertPreTrainedModel

Model = TypeVar("Model", bound="BertPreTrainedModel")


def refuse_backend(backend: str | None, model_type: str) -> None:
    """For a model whose head is transformers'. Raises ValueError when a backend was asked for."""
    if backend is not None:
        raise ValueError(
            f"--backend: got {backend!r}, allowed: none for a head of {model_type}, which is "
            "transformers' (the environment variable FASTBERT_BACKEND is a preference)"
        )


def load_whole(
    kind: type[Model], folder: Path, backend: str | None, parts: tuple[str, ...], head: str
) -> Model:
    """The model, refused when one of ``parts`` would be random: results of it mean nothing.

    ``parts`` are beginnings of names of weights, ``head`` is what they are called together.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = kind.from_pretrained(folder, backend=backend)
    for warning in caught:
        if any(part in str(warning.message) for part in parts):
            raise ValueError(f"MODEL: no whole {head}: {warning.message}")
        warnings.warn(warning.message, stacklevel=2)
    return model
