"""The interface of a fine-tuning task: the attributes and methods in which the tasks differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastbert.config import BertConfig
from fastbert.data.model_tokenizer import ModelTokenizer
from fastbert.finetuning.metrics import Figures
from fastbert.modules import BertPreTrainedModel

# A sequence of tokens in the form that a packed collator takes. The entry "example" is the index of
# the example that the sequence encodes.
Feature = dict[str, Any]
Batch = dict[str, Any]
# An example is a NamedTuple whose first field ``place`` names the file and line in error messages.
Example = Any


class Confusion(NamedTuple):
    """A confusion matrix, which counts how often each label was predicted for an expected label.

    Attributes:
        matrix: Counts, int64 of shape ``(C, C)``; a row is an expected label.
        names: The names of the labels.
    """

    matrix: NDArray[np.int64]
    names: list[str]


class Judgement(NamedTuple):
    """The figures of a model on a part of the data.

    Attributes:
        figures: The figures by name.
        confusion: The confusion matrix of a task with labels; otherwise None.
    """

    figures: Figures
    confusion: Confusion | None


class Task(ABC):
    """A task, with the methods that read and encode its data and evaluate its models.

    Attributes:
        name: Name of the subcommand of ``fastbert finetune``.
        formats: The suffixes of the data files of the task.
        folders: Whether a part may be a folder.
        kind: The class of the task's model, such as `BertForSequenceClassification`.
        head: Prefixes of the names of the weights that belong to the head.
        main: Name and title of the main figure, which decides the best evaluation.
        longest: Default of the largest number of tokens; None means the limit of the model.
    """

    name: str
    formats: tuple[str, ...]
    folders = False
    kind: type[BertPreTrainedModel]
    head: tuple[str, ...]
    main: tuple[str, str]
    longest: int | None = None

    @abstractmethod
    def read(self, path: Path, *, labelled: bool = True) -> list[Example]:
        """Read the examples of a part.

        Args:
            path: A file or folder.
            labelled: Whether the examples have labels; if not, their labels are empty or None.

        Returns:
            The examples, at least one.

        Raises:
            ValueError: If the data are not usable. The message names the file and the line.
        """

    @abstractmethod
    def unlabelled(self, path: Path) -> str | None:
        """Return why a part has no labels that can evaluate a model; None if it has labels.

        Test parts are often published without labels. `learn` must be called before this method.

        Args:
            path: A file or folder.

        Raises:
            ValueError: If the data are not usable. The message names the file and the line.
        """

    def learn(self, examples: Sequence[Example]) -> None:  # noqa: B027
        """Store facts about the whole training part, such as the names of the labels."""

    def weigh(self, examples: Sequence[Example]) -> str | None:
        """Compute the weights of the labels from the training part without held-out examples.

        Returns:
            A line that shows the weights to the user; None without weights.
        """
        return None

    def group(self, example: Example) -> Hashable:
        """Return the group of an example; all examples of a group are held out together."""
        return example.place

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the entries of ``config.json`` that the task decides."""

    @abstractmethod
    def features(self, example: Example, tokenizer: ModelTokenizer) -> list[Feature]:
        """Encode an example as one or several sequences, with its labels if it has labels.

        Raises:
            ValueError: If a label is unknown. The message names the file and the line.
        """

    @abstractmethod
    def collate(self, features: Sequence[Feature]) -> Batch:
        """Build a packed batch from sequences."""

    def output(self, model: Any, batch: Batch) -> Any:
        """Call a model with a batch; the loss of its output is None without labels."""
        return model(**batch)

    def labels_in(self, features: Sequence[Feature]) -> float:
        """Return the number of labels in the mean loss, or the sum of their weights."""
        return len(features)

    def size(self, feature: Feature) -> int:
        """Return the number of rows of logits of a sequence, by default one for each token."""
        return len(feature["input_ids"])

    @abstractmethod
    def rows(self, output: Any, lengths: list[int]) -> list[Tensor]:
        """Divide the output of a model into the logits of each sequence of the batch.

        Args:
            output: The output of the model.
            lengths: Numbers of tokens of the sequences.

        Returns:
            Tensors of shape ``(R, num_labels)``, where R is the number of rows that `size` returns.
        """

    @abstractmethod
    def judge(
        self, examples: Sequence[Example], features: Sequence[Feature], rows: Sequence[Tensor]
    ) -> Judgement:
        """Compare the results of a model with the labels.

        Args:
            examples: The examples of the part.
            features: The sequences of these examples.
            rows: The logits of each sequence as `rows` returns them, in fp32 on the CPU.

        Returns:
            The figures, which do not include the loss.
        """

    @abstractmethod
    def answers(
        self, examples: Sequence[Example], features: Sequence[Feature], rows: Sequence[Tensor]
    ) -> list[dict[str, Any]]:
        """Return the prediction for each example as data for JSON; arguments are as for `judge`."""

    @abstractmethod
    def describe(self, figures: Figures) -> str:
        """Format the main figures in one line."""


def label_settings(names: Sequence[str]) -> dict[str, Any]:
    """Return the entries of ``config.json`` with the number and the names of the labels."""
    return {
        "num_labels": len(names),
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def label_names(config: BertConfig) -> list[str]:
    """Return the names of the labels in a configuration by index.

    Raises:
        ValueError: If ``id2label`` lacks an index.
    """
    named = config.to_dict()["id2label"]
    try:
        return [str(named[str(index)]) for index in range(config.num_labels)]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"model: its id2label is {named!r:.200}, allowed: a name for each of "
            f"0 … {config.num_labels - 1}"
        ) from error
