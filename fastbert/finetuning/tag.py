"""Classification of the words of sentences, such as the recognition of names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fastbert.data import PackedCollatorForTokenClassification
from fastbert.data.conll import read_conll
from fastbert.data.model_tokenizer import ModelTokenizer
from fastbert.data.records import Record, read_records
from fastbert.finetuning import metrics
from fastbert.finetuning.labels import Labels, Value, check_label
from fastbert.finetuning.metrics import Figures
from fastbert.finetuning.options import FinetuneOptions
from fastbert.finetuning.task import Batch, Confusion, Feature, Judgement, Task, label_settings
from fastbert.modules import BertForTokenClassification

# The label of tokens that do not begin a word, which the loss leaves out.
IGNORED = -100
ROWS = (".jsonl", ".parquet")
# CoNLL 2003 names its files eng.train, eng.testa and eng.testb.
CONLL = (".conll", ".txt", ".bio", ".iob", ".train", ".testa", ".testb")


@dataclass(frozen=True, kw_only=True)
class TagOptions(FinetuneOptions):
    """Options of the classification of words.

    The data are CoNLL files, or .jsonl or .parquet files with a list of words and a list of tags in
    each row.

    Args:
        words_field: Field of a .jsonl or .parquet file that has the words.
        tags_field: Field of a .jsonl or .parquet file that has the tags.
        labels: Names of the tags in the order of their indices; empty takes the tags of the
            training part, sorted. With names, the data may have indices instead of names.
    """

    words_field: str = "tokens"
    tags_field: str = "tags"
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.labels:
            Labels(self.labels)

    def task(self) -> Tag:
        """Return the task."""
        labels = Labels(self.labels) if self.labels else None
        return Tag(self.words_field, self.tags_field, labels)


class Sentence(NamedTuple):
    """A sentence with the tag of each word.

    Attributes:
        place: The file and the line.
        words: The words.
        tags: The tags, names or indices; empty if they are unknown.
    """

    place: str
    words: list[str]
    tags: list[Value]


class Tag(Task):
    """The task of `BertForTokenClassification`.

    The label of a word is at its first token, and the other tokens do not count (Devlin et al.
    2019, section 5.3).

    Attributes:
        labels: The names of the tags; None before `learn`.
    """

    name = "tag"
    formats = (*ROWS, *CONLL)
    kind = BertForTokenClassification
    head = ("classifier.",)

    def __init__(self, words_field: str, tags_field: str, labels: Labels | None) -> None:
        """Keep the names of the fields, and the labels if they are known."""
        self.fields, self.labels = (words_field, tags_field), labels
        self.main = ("accuracy", "accuracy")
        self._collate = PackedCollatorForTokenClassification()
        self._choose_main()

    def _choose_main(self) -> None:
        if self.labels is not None and metrics.have_entities(self.labels.names):
            self.main = ("f1", "F1 of entities")

    def read(self, path: Path, *, labelled: bool = True) -> list[Sentence]:
        """Read sentences; see `Task.read`."""
        suffix = path.suffix.lower()
        if suffix in CONLL:
            records = read_conll(path, tagged=labelled)
        elif suffix in ROWS:
            records = read_records(path, self.fields if labelled else self.fields[:1])
        else:
            raise ValueError(
                f"{path}: got the suffix {suffix!r}, allowed: {', '.join(self.formats)}"
            )
        return [self._sentence(record, labelled) for record in records]

    def _sentence(self, record: Record, labelled: bool) -> Sentence:
        place, (words, *rest) = record
        if not isinstance(words, list) or not words or not all(map(_is_word, words)):
            allowed = "a list of words that are not empty"
            raise ValueError(f"{place}: {self.fields[0]}: got {words!r:.100}, allowed: {allowed}")
        if not labelled:
            return Sentence(place, words, [])
        (tags,) = rest
        if not isinstance(tags, list):
            raise ValueError(
                f"{place}: {self.fields[1]}: got {tags!r:.100}, allowed: a list of tags"
            )
        if len(tags) != len(words):
            raise ValueError(
                f"{place}: got {len(words)} words and {len(tags)} tags, "
                "allowed: a tag for each word"
            )
        return Sentence(place, words, [check_label(tag, place) for tag in tags])

    def learn(self, examples: Sequence[Sentence]) -> None:
        """Take the tags of the training part, unless they are known."""
        if self.labels is None:
            self.labels = Labels.found_in(tag for example in examples for tag in example.tags)
            self._choose_main()

    def settings(self) -> dict[str, Any]:
        """Return the number and the names of the tags."""
        return label_settings(self._names())

    def _names(self) -> list[str]:
        assert self.labels is not None
        return self.labels.names

    def features(self, example: Sentence, tokenizer: ModelTokenizer) -> list[Feature]:
        """Encode a sentence as one sequence, or as several if it is long; see `Task.features`."""
        assert self.labels is not None
        tags = [self.labels.index(tag, example.place) for tag in example.tags]
        features = []
        for ids, first, places in tokenizer.encode_words(example.words):
            labels = [IGNORED] * len(ids)
            for number, place in enumerate(places):
                if tags:
                    labels[place] = tags[first + number]
            # The collator ignores the column with the places of the words.
            feature = {"input_ids": ids, "token_type_ids": [0] * len(ids), "places": places}
            features.append({**feature, "labels": labels} if tags else feature)
        return features

    def collate(self, features: Sequence[Feature]) -> Batch:
        """Build a packed batch."""
        return self._collate(features)

    def labels_in(self, features: Sequence[Feature]) -> int:
        """Return the number of words."""
        return sum(len(feature["places"]) for feature in features)

    def rows(self, output: Any, lengths: list[int]) -> list[Tensor]:
        """Return the logits of each sequence, of shape ``(length, num_labels)``."""
        return list(output.logits.split(lengths))

    def _predicted(
        self, examples: Sequence[Sentence], features: Sequence[Feature], rows: Sequence[Tensor]
    ) -> list[list[int]]:
        """Return the index of the tag of each word."""
        found: list[list[int]] = [[] for _ in examples]
        for feature, row in zip(features, rows, strict=True):
            found[feature["example"]] += row[feature["places"]].argmax(-1).tolist()
        return found

    def judge(
        self, examples: Sequence[Sentence], features: Sequence[Feature], rows: Sequence[Tensor]
    ) -> Judgement:
        """Compute the figures of the words, and those of entities if the tags mark entities."""
        assert self.labels is not None
        names = self.labels.names
        predicted = self._predicted(examples, features, rows)
        expected = [
            [self.labels.index(tag, example.place) for tag in example.tags] for example in examples
        ]
        matrix = metrics.confusion_matrix(
            np.concatenate(expected), np.concatenate(predicted), len(names)
        )
        figures = metrics.classification(matrix, names)
        if metrics.have_entities(names):
            truth = [[names[tag] for tag in tags] for tags in expected]
            given = [[names[tag] for tag in tags] for tags in predicted]
            figures |= metrics.entity_scores(truth, given)
        return Judgement(figures, Confusion(matrix, names))

    def answers(
        self, examples: Sequence[Sentence], features: Sequence[Feature], rows: Sequence[Tensor]
    ) -> list[dict[str, Any]]:
        """Return the words with their tags, and the entities if the tags mark entities."""
        names = self._names()
        found = []
        predicted = self._predicted(examples, features, rows)
        for example, indices in zip(examples, predicted, strict=True):
            tags = [names[index] for index in indices]
            answer: dict[str, Any] = {"words": example.words, "tags": tags}
            if metrics.have_entities(names):
                answer["entities"] = [
                    {"type": kind, "words": example.words[first : last + 1], "first": first}
                    for kind, first, last in metrics.entities(tags)
                ]
            found.append(answer)
        return found

    def describe(self, figures: Figures) -> str:
        """Format F1 and accuracy."""
        accuracy = f"accuracy of words {figures['accuracy']:.1%}"
        if "entities" not in figures:
            return f"{accuracy}, macro F1 {figures['macro_f1']:.1%}"
        return (
            f"entities: precision {figures['precision']:.1%}, recall {figures['recall']:.1%}, "
            f"F1 {figures['f1']:.1%}; {accuracy}"
        )


def _is_word(word: Any) -> bool:
    return isinstance(word, str) and bool(word.strip())
