"""Classification of texts or pairs of texts with one or several labels each, and regression."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastbert.data import PackedCollatorForSequenceClassification
from fastbert.data.model_tokenizer import ModelTokenizer
from fastbert.data.records import FORMATS, NoField, Record, read_records
from fastbert.data.text_folders import read_text_folder
from fastbert.finetuning import metrics
from fastbert.finetuning.class_weights import ClassWeights, Given, check_class_weights
from fastbert.finetuning.labels import NO_LABELS, Labels, Value, check_label, check_number
from fastbert.finetuning.metrics import Figures
from fastbert.finetuning.multi_label import SEPARATOR, MultiLabel, targets
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
        labels: Names of the labels in the order of their indices; if empty, the labels of the
            training part, sorted. The data may have indices instead of names only if this option is
            not empty.
        regression: Whether the labels are numbers that the model predicts.
        multi_label: Whether an example has any number of labels, including none. The labels are a
            list, or a text with a separator between two labels.
        label_separator: The separator between two labels of a text, for `multi_label`.
        class_weights: Weights of the labels in the loss: ``"balanced"`` for weights that make all
            labels count equally, or numbers > 0 by the names of labels, where a label without a
            number has the weight 1; None weighs all examples equally.
    """

    text_field: str = "text"
    pair_field: str | None = None
    label_field: str = "label"
    labels: tuple[str, ...] = ()
    regression: bool = False
    multi_label: bool = False
    label_separator: str = SEPARATOR
    class_weights: Given | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if an option is not allowed."""
        super().__post_init__()
        check_class_weights(self.class_weights)
        for name, value in (("regression", self.regression), ("multi_label", self.multi_label)):
            both = self.class_weights is not None and value
            given = (self.class_weights, value)
            check(f"class_weights and {name}", given, "at most one of them", not both)
        modes = (self.multi_label, self.regression)
        check("multi_label and regression", modes, "at most one of them", not all(modes))
        separator = self.label_separator
        sound = isinstance(separator, str) and separator != ""
        check("label_separator", separator, "a text that is not empty", sound)
        named = (self.labels, self.regression)
        sound = not (self.labels and self.regression)
        check("labels and regression", named, "at most one of them", sound)
        if self.labels:
            Labels(self.labels)

    def task(self) -> Classify:
        """Return the classification or regression with these options."""
        fields = (self.text_field, *((self.pair_field,) if self.pair_field is not None else ()))
        labels = Labels(self.labels, by_index=True) if self.labels else None
        weights = ClassWeights(self.class_weights)
        return Classify(
            fields,
            self.label_field,
            labels,
            regression=self.regression,
            multi=MultiLabel(self.label_separator) if self.multi_label else None,
            weights=weights,
        )


class Text(NamedTuple):
    """A text or a pair of texts with its label.

    Attributes:
        place: The file and the line of the example, for messages.
        texts: One text or two.
        label: The name or index of the label, a tuple of all labels of a multi-label task, the
            number of a regression, or None if it is unknown.
    """

    place: str
    texts: tuple[str, ...]
    label: Value | float | tuple[Value, ...] | None


class Classify(Task):
    """The task of `BertForSequenceClassification`.

    Attributes:
        labels: The labels; None before `learn`, and in the training of a regression.
        multi: How the labels of a multi-label task are parsed and predicted; None if every example
            has exactly one label.
    """

    name = "classify"
    formats = FORMATS
    folders = True
    kind = BertForSequenceClassification
    head = ("classifier.",)

    def __init__(
        self,
        fields: tuple[str, ...],
        label_field: str,
        labels: Labels | None,
        *,
        regression: bool,
        multi: MultiLabel | None = None,
        weights: ClassWeights | None = None,
    ) -> None:
        """Store the names of the fields, and the labels if they are known."""
        self.weights = weights or ClassWeights(None)
        self.fields, self.label_field = fields, label_field
        self.labels, self.regression, self.multi = labels, regression, multi
        self.main = ("micro_f1", "micro F1") if multi else ("accuracy", "accuracy")
        if regression:
            self.main = ("pearson", "Pearson correlation")
        self._collate = PackedCollatorForSequenceClassification()

    def read(self, path: Path, *, labelled: bool = True) -> list[Text]:
        """Read texts; see `Task.read`."""
        if path.is_dir():
            if self.multi is not None:
                raise ValueError("multi_label: got True, allowed: False for a folder of texts")
            if len(self.fields) > 1:
                raise ValueError(f"pair_field: got {self.fields[1]!r}, allowed: None for a folder")
            records = read_text_folder(path)
        else:
            fields = (*self.fields, self.label_field) if labelled else self.fields
            records = read_records(path, fields)
        return [self._text(record, labelled) for record in records]

    def unlabelled(self, path: Path) -> str | None:
        """Return a message if `path` has no labels, or only values such as -1.

        See `Task.unlabelled`, and `NO_LABELS` for the values that replace withheld labels.
        """
        if path.is_dir():
            return None
        try:
            labels = {str(value) for _, (value,) in read_records(path, (self.label_field,))}
        except NoField as error:
            return str(error)
        known = set(self.labels.names) if self.labels else set()
        if labels - known <= NO_LABELS and not labels & known:
            return f"{path}: {self.label_field} is {', '.join(sorted(labels))} everywhere"
        return None

    def _text(self, record: Record, labelled: bool) -> Text:
        place, values = record
        texts = values[: len(self.fields)]
        for field, text in zip(self.fields, texts, strict=True):
            if not isinstance(text, str):
                got = type(text).__name__
                raise ValueError(f"{place}: {field}: got a {got}, allowed: a text")
        label: Any = None
        if labelled and self.multi is not None:
            label = self.multi.values(values[-1], place)
        elif labelled and isinstance(values[-1], (list, tuple)):
            allowed = "one label, or several with multi_label (--multi-label)"
            raise ValueError(f"{place}: got the labels {values[-1]!r:.100}, allowed: {allowed}")
        elif labelled:
            label = (check_number if self.regression else check_label)(values[-1], place)
        return Text(place, texts, label)

    def learn(self, examples: Sequence[Text]) -> None:
        """Read the labels from the training part, unless they are known."""
        if self.labels is None and not self.regression:
            self.labels = Labels.of_values(_labels_of(examples))

    def weigh(self, examples: Sequence[Text]) -> str | None:
        """Compute the weights of the labels; see `Task.weigh`."""
        if self.labels is None:
            return None
        return self.weights.learn(self.labels.names, map(self._target, examples))

    def settings(self) -> dict[str, Any]:
        """Return the entries of ``config.json`` for the labels, and the ``problem_type``."""
        if self.regression:
            return {**label_settings(["LABEL_0"]), "problem_type": "regression"}
        assert self.labels is not None
        problem = f"{'multi' if self.multi else 'single'}_label_classification"
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
        if self.multi is not None:
            return targets(self.labels, label, example.place)  # type: ignore[arg-type]
        return self.labels.index(label, example.place)  # type: ignore[arg-type]

    def collate(self, features: Sequence[Feature]) -> Batch:
        """Build a packed batch from sequences."""
        return self._collate(features)

    def output(self, model: Any, batch: Batch) -> Any:
        """Call a model with a batch, and compute the loss with the weights of the labels."""
        return self.weights.output(model, batch)

    def labels_in(self, features: Sequence[Feature]) -> float:
        """Return the number of sequences or, with class weights, the sum of the labels' weights."""
        if self.weights.values is None:
            return len(features)
        return self.weights.total(feature["labels"] for feature in features)

    def size(self, feature: Feature) -> int:
        """Return 1, because a sequence has one row of logits."""
        return 1

    def rows(self, output: Any, lengths: list[int]) -> list[Tensor]:
        """Return the logits of each sequence, of shape ``(1, num_labels)``."""
        return list(output.logits.split(1))

    def judge(
        self, examples: Sequence[Text], features: Sequence[Feature], rows: Sequence[Tensor]
    ) -> Judgement:
        """Compute the figures of a classification or of a regression."""
        expected = np.array([feature["labels"] for feature in features])
        if self.regression:
            predicted = np.array([float(row) for row in rows])
            return Judgement(metrics.regression(expected, predicted), None)
        assert self.labels is not None
        names = self.labels.names
        if self.multi is not None:
            chosen = self.multi.chosen(torch.cat(list(rows)))
            return Judgement(metrics.multi_label(expected > 0, chosen, names), None)
        predicted = np.array([int(row.argmax()) for row in rows])
        matrix = metrics.confusion_matrix(expected, predicted, len(names))
        return Judgement(metrics.classification(matrix, names), Confusion(matrix, names))

    def answers(
        self, examples: Sequence[Text], features: Sequence[Feature], rows: Sequence[Tensor]
    ) -> list[dict[str, Any]]:
        """Return for each example its label or labels with scores, or the predicted numbers."""
        if self.regression and self.labels is None:
            return [{"score": float(row)} for row in rows]
        assert self.labels is not None
        names = self.labels.names
        if self.regression:
            return [{"scores": dict(zip(names, row[0].tolist(), strict=True))} for row in rows]
        if self.multi is not None:
            return self.multi.answers(torch.cat(list(rows)), names)
        answers = []
        for row in rows:
            scores = dict(zip(names, row[0].softmax(-1).tolist(), strict=True))
            label = names[int(row.argmax())]
            answers.append({"label": label, "score": scores[label], "scores": scores})
        return answers

    def describe(self, figures: Figures) -> str:
        """Format accuracy and F1, or the correlations and the error of a regression."""
        if self.regression:
            return (
                f"Pearson {figures['pearson']:.3f}, Spearman {figures['spearman']:.3f}, "
                f"mean squared error {figures['mean_squared_error']:.4g}"
            )
        if self.multi is not None:
            return (
                f"micro F1 {figures['micro_f1']:.1%}, macro F1 {figures['macro_f1']:.1%}, "
                f"subset accuracy {figures['subset_accuracy']:.1%}"
            )
        return f"accuracy {figures['accuracy']:.1%}, macro F1 {figures['macro_f1']:.1%}"


def _labels_of(examples: Iterable[Text]) -> Iterable[Value]:
    """Yield every label of every example; an example has one label or a tuple of labels."""
    for example in examples:
        label: Any = example.label
        yield from label if isinstance(label, tuple) else (label,)
