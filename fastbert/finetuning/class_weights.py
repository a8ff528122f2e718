"""Weights of the labels in the loss of a classification."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fastbert.training.options import check, is_number

BALANCED = "balanced"
Given = str | Mapping[str, float]
# A line that shows the weights names at most this number of labels.
MOST_SHOWN = 20


def check_class_weights(value: Any) -> None:
    """Raise ValueError unless a value is None, ``"balanced"``, or maps labels to numbers > 0."""
    allowed = f"None, {BALANCED!r}, or a finite number > 0 for each label that it names"
    sound = value is None or value == BALANCED
    if isinstance(value, Mapping) and value:
        sound = all(isinstance(name, str) for name in value)
        sound = sound and all(is_number(number) and number > 0 for number in value.values())
    check("class_weights", value, allowed, sound)


class ClassWeights:
    """The weights of the labels of a task.

    The loss of a batch is the sum of the weighted losses of its labels, divided by the sum of their
    weights, as in ``torch.nn.CrossEntropyLoss``. The mean of the losses of several batches, each
    weighted by `total`, is therefore the loss of all batches together.

    Attributes:
        values: The weight of each label by its index; None without weights, and before `learn`.
    """

    def __init__(self, given: Given | None) -> None:
        """Store the weights, which `check_class_weights` must allow."""
        self._given = given
        self.values: list[float] | None = None

    def learn(self, names: Sequence[str], labels: Iterable[int]) -> str | None:
        """Compute the weight of each label.

        With ``"balanced"``, a label that appears n times in `labels` has the weight N / (C n), as
        in scikit-learn (King and Zeng 2001), where N is the number of `labels` and C the number of
        `names`. If the weights are numbers by name, a label without a number has the weight 1.

        Args:
            names: The names of the labels, by index.
            labels: The indices of all labels of the training part.

        Returns:
            A line that shows the weights to the user; None without weights.

        Raises:
            ValueError: If a name is unknown, or if the weights are balanced and a label does not
                appear.
        """
        if self._given is None:
            return None
        if isinstance(self._given, Mapping):
            unknown = [name for name in self._given if name not in names]
            allowed = f"weights of the labels {', '.join(names):.500}"
            check("class_weights", ", ".join(unknown), allowed, not unknown)
            self.values = [float(self._given.get(name, 1.0)) for name in names]
        else:
            counts = torch.bincount(torch.tensor(list(labels)), minlength=len(names)).tolist()
            absent = [name for name, count in zip(names, counts, strict=True) if not count]
            allowed = f"weights by name, because the training part has no {', '.join(absent):.200}"
            check("class_weights", self._given, allowed, not absent)
            self.values = [sum(counts) / (len(names) * count) for count in counts]
        shown = [f"{name} {value:.4g}" for name, value in zip(names, self.values, strict=True)]
        more = ", …" if len(shown) > MOST_SHOWN else ""
        return f"class weights: {', '.join(shown[:MOST_SHOWN])}{more}"

    def total(self, labels: Iterable[int]) -> float:
        """Return the sum of the weights of `labels`, by which the sum of their losses is divided.

        Without weights, each label has the weight 1.
        """
        values = self.values
        return sum(1 if values is None else values[label] for label in labels)

    def output(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Call a model with a batch, and compute the loss with the weights.

        Args:
            model: A model with logits of shape ``(N, C)``.
            batch: A packed batch; its ``labels``, if there are any, are int64 of shape ``(N,)``.
                The loss ignores the label -100.

        Returns:
            The output of the model. The loss with weights is computed in fp32.
        """
        if self.values is None or "labels" not in batch:
            return model(**batch)
        output = model(**{name: value for name, value in batch.items() if name != "labels"})
        logits = output.logits.float()
        weights = torch.tensor(self.values, device=logits.device)
        output.loss = F.cross_entropy(logits, batch["labels"], weights)
        return output


def parse_class_weights(text: str | None) -> Given | None:
    """Parse the weights in a text such as ``"balanced"`` or ``"no=1,yes=4.5"``.

    Args:
        text: The text of an option, or None.

    Returns:
        None, ``"balanced"`` or the weights by name.

    Raises:
        ValueError: If the text has another form, names a label twice, or has the weight 0.

    Examples:
        >>> from fastbert.finetuning.class_weights import parse_class_weights
        >>> parse_class_weights("no=1,yes=4.5")
        {'no': 1.0, 'yes': 4.5}
    """
    if text is None or text.strip() == BALANCED:
        return text and BALANCED
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.rpartition("="))
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        allowed = f"{BALANCED!r}, or NAME=NUMBER,NAME=NUMBER with each label once"
        check("class_weights", text, allowed, bool(name and value) and name not in weights)
        weights[name] = value
    return weights
