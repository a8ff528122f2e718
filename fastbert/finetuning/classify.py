"""Classification of texts or pairs of texts by one label, and regression to a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fastbert.data import PackedCollatorForSequenceClassification
from fastbert.data.model_tokenizer import ModelTokenizer
from fastbert.data.records import FORMATS, Record, read_records
from fastbert.data.text_folders import read_text_folder
from fastbert.finetuning import metrics
from fastbert.finetuning.labels import Labels, Value, check_label, check_number
from fastbert.finetuning.metrics import Figures
from fastbert.finetuning.options import FinetuneOptions
from fastbert.finetuning.task import Batch, Confusion, Feature, Judgement, Task, label_settings
from fastbert.modules import BertForSequenceClassification
from fastbert.training.options import check


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions(FinetuneOptions):
    """Options of the classification of texts.

    The data are .csv, .tsv, .jsonl or .parquet files, or folders with a subfolder of .txt files for
    each label.

    Args:
        text_field: Column or field that has the text.
        pair_field: Column or field that has a second text; None means single texts.
        label_field: Column or field that has the label.
        labels: Names of the labels in the order of their indices; empty takes the labels of the
            training part, sorted. With names, the data may have indices instead of names.
        regression: Whether the labels are numbers that the model predicts.
    """

    text_field: str = "text"
    pair_field: str | None = None
    label_field: str = "label"
    labels: tuple[str, ...] = ()
    regression: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        both = bool(self.labels) and self.regression
        check("labels and regression", (self.labels, both), "at most one of them", not both)
        if self.labels:
            Labels(self.labels)

    def task(self) -> Classify:
        """Return the task."""
        fields = (self.text_field, *((self.pair_field,) if self.pair_field is not None else ()))
        labels = Labels(self.labels) if self.labels else None
        return Classify(fields, self.label_field, labels, regression=self.regression)


class Text(NamedTuple):
    """A text or a pair of texts with its label.

    Attributes:
        place: The file and the line.
        texts: One text or two.
        label: The name or the index of the label, a number of a regression, or None.
    """

    place: str
    texts: tuple[str, ...]
    label: Value | float | None


class Classify(Task):
    """The task of `BertForSequenceClassification`.

    Attributes:
        labels: The labels; None before `learn`, and in a regression.
    """

    name = "classify"
    formats = FORMATS
    folders = True
    kind = BertForSequenceClassification
    head = ("classifier.",)

    def __init__(
        self, fields: tuple[str, ...], label_field: str, labels: Labels | None, *, regression: bool
    ) -> None:
        """Keep the names of the fields, and the labels if they are known."""
        self.fields, self.label_field = fields, label_field
        self.labels, self.regression = labels, regression
        self.main = ("pearson", "Pearson correlation") if regression else ("accuracy", "accuracy")
        self._collate = PackedCollatorForSequenceClassification()

    def read(self, path: Path, *, labelled: bool = True) -> list[Text]:
        """Read texts; see `Task.read`."""
        if path.is_dir():
            if len(self.fields) > 1:
                raise ValueError(f"pair_field: got {self.fields[1]!r}, allowed: None for a folder")
            records = read_text_folder(path)
        else:
            fields = (*self.fields, self.label_field) if labelled else self.fields
            records = read_records(path, fields)
        return [self._text(record, labelled) for record in records]

    def _text(self, record: Record, labelled: bool) -> Text:
        place, values = record
        texts = values[: len(self.fields)]
        for field, text in zip(self.fields, texts, strict=True):
            if not isinstance(text, str):
                got = type(text).__name__
                raise ValueError(f"{place}: {field}: got a {got}, allowed: a text")
        label = None
        if labelled:
            label = (check_number if self.regression else check_label)(values[-1], place)
        return Text(place, texts, label)

    def learn(self, examples: Sequence[Text]) -> None:
        """Take the labels of the training part, unless they are known."""
        if self.labels is None and not self.regression:
            self.labels = Labels.found_in(example.label for example in examples)  # type: ignore[misc]

    def settings(self) -> dict[str, Any]:
        """Return the number and the names of the labels, and the kind of the loss."""
        if self.regression:
            return {**label_settings(["LABEL_0"]), "problem_type": "regression"}
        assert self.labels is not None
        problem = "single_label_classification"
        return {**label_settings(self.labels.names), "problem_type": problem}

    def features(self, example: Text, tokenizer: ModelTokenizer) -> list[Feature]:
        """Encode a text or a pair; see `Task.features`."""
        encoded = tokenizer.encode(example.texts)
        types = encoded.token_types or [0] * len(encoded.ids)
        feature = {"input_ids": encoded.ids, "token_type_ids": types}
        if example.label is not None:
            feature["labels"] = self._target(example)
        return [feature]

    def _target(self, example: Text) -> Any:
        label = example.label
        if self.regression:
            return float(label)  # type: ignore[arg-type]
        assert self.labels is not None
        return self.labels.index(label, example.place)  # type: ignore[arg-type]

    def collate(self, features: Sequence[Feature]) -> Batch:
        """Build a packed batch."""
        return self._collate(features)

    def rows(self, output: Any, lengths: list[int]) -> list[Tensor]:
        """Return the logits of each sequence, of shape ``(num_labels,)``."""
        return list(output.logits)

    def judge(
        self, examples: Sequence[Text], features: Sequence[Feature], rows: Sequence[Tensor]
    ) -> Judgement:
        """Compute the figures of a classification or of a regression."""
        expected = np.array([feature["labels"] for feature in features])
        if self.regression:
            predicted = np.array([float(row) for row in rows])
            return Judgement(metrics.regression(expected, predicted), None)
        assert self.labels is not None
        predicted = np.array([int(row.argmax()) for row in rows])
        names = self.labels.names
        matrix = metrics.confusion_matrix(expected, predicted, len(names))
        return Judgement(metrics.classification(matrix, names), Confusion(matrix, names))

    def answers(
        self, examples: Sequence[Text], features: Sequence[Feature], rows: Sequence[Tensor]
    ) -> list[dict[str, Any]]:
        """Return the label with its scores, or the number of a regression."""
        if self.regression:
            return [{"score": float(row)} for row in rows]
        assert self.labels is not None
        found = []
        for row in rows:
            scores = dict(zip(self.labels.names, row.softmax(-1).tolist(), strict=True))
            label = self.labels.names[int(row.argmax())]
            found.append({"label": label, "score": scores[label], "scores": scores})
        return found

    def describe(self, figures: Figures) -> str:
        """Format accuracy and F1, or the correlations."""
        if self.regression:
            return (
                f"Pearson {figures['pearson']:.3f}, Spearman {figures['spearman']:.3f}, "
                f"mean squared error {figures['mean_squared_error']:.4g}"
            )
        return f"accuracy {figures['accuracy']:.1%}, macro F1 {figures['macro_f1']:.1%}"
