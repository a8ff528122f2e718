"""Classification by any number of labels: parsing of the labels, targets and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastbert.finetuning.labels import Labels, Value, check_label
from fastbert.training.options import check, is_number

SEPARATOR, THRESHOLD = ",", 0.5


def check_threshold(value: Any) -> None:
    """Raise ValueError unless a value is a number between 0 and 1."""
    sound = is_number(value) and 0 < value < 1
    check("threshold", value, "a number between 0 and 1", sound)


@dataclass(frozen=True)
class MultiLabel:
    """How a task with several labels per example parses labels and predicts labels.

    Attributes:
        separator: The text between two labels, if an example has all its labels in one text.
        threshold: A label is predicted if its score, a sigmoid, is larger than this number.
    """

    separator: str = SEPARATOR
    threshold: float = THRESHOLD

    def values(self, value: Any, place: str) -> tuple[Value, ...]:
        """Return the labels of an example; an example may have no labels.

        Args:
            value: A list of names or indices, a text with separators between names or indices, or
                one index.
            place: File and line, for the message.

        Returns:
            The labels.

        Raises:
            ValueError: If the value has another type, or contains an empty label. The message
                names the place.
        """
        if isinstance(value, str):
            text = value.strip()
            if text.startswith("[") and text.endswith("]"):
                allowed = f"labels with {self.separator!r} between them, without brackets"
                raise ValueError(f"{place}: got the labels {value!r:.100}, allowed: {allowed}")
            value = [part.strip() for part in text.split(self.separator)] if text else []
        elif isinstance(value, int):
            value = [value]
        if not isinstance(value, (list, tuple)):
            allowed = f"a list, or a text with {self.separator!r} between two labels"
            raise ValueError(f"{place}: got the labels {value!r:.100}, allowed: {allowed}")
        return tuple(check_label(label, place) for label in value)

    def chosen(self, logits: Tensor) -> NDArray[np.bool_]:
        """Return which labels the model predicts for each example.

        Args:
            logits: The logits of all examples, fp32 of shape ``(N, C)``.

        Returns:
            Booleans of shape ``(N, C)``.
        """
        return (logits.sigmoid() > self.threshold).numpy()

    def answers(self, logits: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the predicted ``labels`` and the ``scores`` of all labels, for each example.

        Args:
            logits: As in `chosen`.
            names: The names of the labels.
        """
        answers = []
        for row, chosen in zip(logits.sigmoid().tolist(), self.chosen(logits), strict=True):
            scores = dict(zip(names, row, strict=True))
            labels = [name for name, is_chosen in zip(names, chosen, strict=True) if is_chosen]
            answers.append({"labels": labels, "scores": scores})
        return answers


def targets(labels: Labels, values: Sequence[Value], place: str) -> list[float]:
    """Return 1.0 for each label of an example and 0.0 for the others, by index.

    Args:
        labels: All labels.
        values: Names or indices of the labels of the example.
        place: File and line, for the message.

    Raises:
        ValueError: If one of `values` is not a label. The message names the place.
    """
    row = [0.0] * len(labels.names)
    for value in values:
        row[labels.index(value, place)] = 1.0
    return row
