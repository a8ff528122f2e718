"""The best evaluation of a run, and the weights of the model at this evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.training import checkpoints

# The values of the option `keep_epoch`: the user receives the model of the best evaluation, or the
# model after the last step.
KEPT = ("best", "last")


class Evaluation(NamedTuple):
    """An evaluation of the validation part.

    Attributes:
        figure: Name of the figure by which evaluations are compared.
        value: Value of this figure; larger is better.
        epoch: The epoch, from 1, in which the evaluation took place.
        step: Number of steps before the evaluation.
    """

    figure: str
    value: float
    epoch: int
    step: int


class BestEvaluation:
    """The best of the evaluations so far, by one figure; of equal evaluations, the first is best.

    Attributes:
        evaluation: The best evaluation; None before the first evaluation.
        misses: Number of evaluations after the best evaluation.
        weights: Weights of the model at the best evaluation, on the CPU; None if they are not
            stored, or before the first evaluation.
    """

    def __init__(self, model: nn.Module, *, keeps_weights: bool) -> None:
        """Start before the first evaluation.

        Args:
            model: The model that is evaluated.
            keeps_weights: Whether the weights of the best evaluation are stored.
        """
        self._model, self._keeps_weights = model, keeps_weights
        self.evaluation: Evaluation | None = None
        self.misses = 0
        self.weights: dict[str, Tensor] | None = None

    def offer(self, evaluation: Evaluation) -> bool:
        """Store an evaluation if it is better than the best so far, and return whether it is.

        Args:
            evaluation: An evaluation of the model with its current weights.
        """
        if self.evaluation is not None and not evaluation.value > self.evaluation.value:
            self.misses += 1
            return False
        self.evaluation, self.misses = evaluation, 0
        if self._keeps_weights:
            # On the CPU, `weights_of` returns the model's own tensors, which the next step changes.
            present = checkpoints.weights_of(self._model)
            self.weights = {name: tensor.clone() for name, tensor in present.items()}
        return True

    def content(self) -> dict[str, Any] | None:
        """Return the data for the JSON of a checkpoint; None before the first evaluation."""
        if self.evaluation is None:
            return None
        return {**self.evaluation._asdict(), "misses": self.misses}

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the tensors that a checkpoint stores, by the stem of the file's name."""
        return {} if self.weights is None else {"best": self.weights}

    def restore(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Continue with the best evaluation of a checkpoint.

        Raises:
            ValueError: If the stored evaluation is not valid, or if the stored weights do not fit
                the model. The message names the file.
        """
        with checkpoint.reading(checkpoints.STATE):
            # Older checkpoints do not contain the best evaluation.
            content = checkpoint.content.get("best")
            if content is None:
                return
            content = dict(content)
            self.misses = _count(content, "misses", 0)
            for name in ("epoch", "step"):
                _count(content, name, 1)
            figure, value = content["figure"], content["value"]
            if not isinstance(figure, str) or type(value) is not float or math.isinf(value):
                raise ValueError(f"best: got {content!r:.200}, allowed: a figure with its value")
            self.evaluation = Evaluation(figure, value, content["epoch"], content["step"])
        if self._keeps_weights:
            with checkpoint.fitting("best") as weights:
                own = checkpoints.weights_of(self._model)
                if weights.keys() != own.keys():
                    raise ValueError("got other names than the model has")
                for name, tensor in own.items():
                    checkpoints.check_like(name, weights[name], tensor)
                self.weights = weights

    def model(self) -> Any:
        """Return a new model with the best weights, or the run's own model if none are stored."""
        if self.weights is None:
            return self._model
        # The new model draws random weights. These draws must not change the random numbers of
        # dropout.
        with torch.random.fork_rng(devices=[]):
            model = type(self._model)(self._model.config)
        checkpoints.restore_weights(model, self.weights)
        return model

    def apply(self) -> None:
        """Write the best weights into the model, if they are stored."""
        if self.weights is not None:
            checkpoints.restore_weights(self._model, self.weights)


def _count(content: dict[str, Any], name: str, least: int) -> int:
    value = content[name]
    if type(value) is not int or not least <= value < checkpoints.MOST:
        raise ValueError(f"best: {name}: got {value!r:.100}, allowed: an integer >= {least}")
    return value
