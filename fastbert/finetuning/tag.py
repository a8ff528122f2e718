"""Classification of the words of sentences, such as the recognition of names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fastbert.data import PackedCollatorForTokenClassification
from fastbert.data.conll import DOCUMENT, Columns, read_conll
from fastbert.data.model_tokenizer import ModelTokenizer
from fastbert.data.records import NoField, Record, read_records
from fastbert.data.words import split_words
from fastbert.finetuning import metrics
from fastbert.finetuning.class_weights import ClassWeights, Given, check_class_weights
from fastbert.finetuning.labels import NO_LABELS, Labels, Value, check_label
from fastbert.finetuning.metrics import Figures
from fastbert.finetuning.options import FinetuneOptions
from fastbert.finetuning.task import Batch, Confusion, Feature, Judgement, Task, label_settings
from fastbert.modules import BertForTokenClassification
from fastbert.text_file import content_suffix, read_text
from fastbert.training.options import check

# The label of tokens that do not begin a word; the loss ignores these tokens.
IGNORED = -100
ROWS = (".jsonl", ".parquet")
# CoNLL 2003 names its files eng.train, eng.testa and eng.testb, and GermEval 2014 writes .tsv.
CONLL = (".conll", ".conllu", ".txt", ".tsv", ".bio", ".iob", ".train", ".testa", ".testb")


@dataclass(frozen=True, kw_only=True)
class TagOptions(FinetuneOptions):
    """Options of the classification of words.

    The data are CoNLL files, or .jsonl or .parquet files with a list of words and a list of tags in
    each row.

    Args:
        words_field: Field of a .jsonl or .parquet file that has the words, or number of the column
            of a CoNLL file, from 1. With the default, the column of a CoNLL file is detected.
        tags_field: Field or number of the column that has the tags. It is a number if and only if
            `words_field` is a number.
        labels: Names of the tags in the order of their indices; if empty, the tags of the training
            part, sorted. The data may have indices instead of names only if this option is not
            empty.
        class_weights: Weights of the tags in the loss, as in `ClassifyOptions`.
    """

    words_field: str = "tokens"
    tags_field: str = "tags"
    labels: tuple[str, ...] = ()
    class_weights: Given | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if an option is not allowed."""
        super().__post_init__()
        check_class_weights(self.class_weights)
        fields = (self.words_field, self.tags_field)
        numbers = {field.isdecimal() for field in fields}
        allowed = "two names of fields, or two numbers of columns"
        check("words_field and tags_field", fields, allowed, len(numbers) == 1)
        if self.labels:
            Labels(self.labels)

    def task(self) -> Tag:
        """Return the classification of words with these options."""
        labels = Labels(self.labels, by_index=True) if self.labels else None
        return Tag(self.words_field, self.tags_field, labels, ClassWeights(self.class_weights))


class Sentence(NamedTuple):
    """A sentence with the tag of each word.

    Attributes:
        place: The file and the line of the sentence, for messages.
        words: The words of the sentence.
        tags: The tags, names or indices; empty if they are unknown.
    """

    place: str
    words: list[str]
    tags: list[Value]


class PlainSentence(NamedTuple):
    """A sentence that `split_words` divided into words; see also `Sentence`.

    Attributes:
        text: The sentence as one text.
        starts: Index of the first character of each word.
    """

    place: str
    words: list[str]
    tags: list[Value]
    text: str
    starts: list[int]


class Tag(Task):
    """The task of `BertForTokenClassification`.

    The label of a word is at its first token, and the loss ignores the other tokens (Devlin et al.
    2019, section 5.3).

    Attributes:
        labels: The tags, as `Labels`; None before `learn`.
    """

    name = "tag"
    formats = (*ROWS, *CONLL)
    kind = BertForTokenClassification
    head = ("classifier.",)

    def __init__(
        self,
        words_field: str,
        tags_field: str,
        labels: Labels | None,
        weights: ClassWeights | None = None,
    ) -> None:
        """Store the names of the fields, and the labels if they are known."""
        self.weights = weights or ClassWeights(None)
        self.fields, self.labels = (words_field, tags_field), labels
        self.main = ("accuracy", "accuracy")
        self._collate = PackedCollatorForTokenClassification()
        self._choose_main()

    def _choose_main(self) -> None:
        if self.labels is not None and metrics.have_entities(self.labels.names):
            self.main = ("f1", "F1 of entities")

    def read(self, path: Path, *, labelled: bool = True) -> list[Any]:
        """Read sentences; see `Task.read`.

        If `labelled` is False, each line of a .txt file, or each field of words, may be a sentence
        as one text. `split_words` then divides the sentence into words.
        """
        if not labelled and self._is_plain(path):
            return _plain_sentences(path)
        return [self._sentence(record, labelled) for record in self._records(path, labelled)]

    def _records(self, path: Path, labelled: bool) -> Iterator[Record]:
        suffix = content_suffix(path)
        if suffix in CONLL:
            return read_conll(path, tagged=labelled, columns=self._columns())
        if suffix in ROWS:
            return read_records(path, self.fields if labelled else self.fields[:1])
        allowed = ", ".join(self.formats)
        raise ValueError(f"{path}: got the suffix {suffix!r}, allowed: {allowed}")

    def _columns(self) -> Columns | None:
        """Return the columns of a CoNLL file; None if the fields are names, not numbers."""
        word, tag = self.fields
        if not word.isdecimal():
            return None
        return Columns(int(word), int(tag) if tag.isdecimal() else 0)

    def _is_plain(self, path: Path) -> bool:
        """Return whether a .txt file has a sentence in each line rather than a word."""
        if content_suffix(path) != ".txt" or self._columns() is not None:
            return False
        lines = [line.split() for line in read_text(path).split("\n")]
        filled = [fields for fields in lines if fields and fields[0] != DOCUMENT]
        widths = {len(fields) for fields in filled}
        if widths <= {1}:
            # A file with one word per line has blank lines between sentences.
            return [] not in lines[:-1]
        tagged = sum(fields[-1] in self._names() for fields in filled)
        if len(widths) > 1 or not tagged:
            return True
        if tagged < len(filled):
            raise ValueError(
                f"{path}: {tagged:,} of {len(filled):,} lines end with a tag of the model, "
                "allowed: all lines, or none if each line is a sentence; a file of columns may be "
                "named .conll"
            )
        return False

    def _sentence(self, record: Record, labelled: bool) -> Sentence | PlainSentence:
        place, (words, *rest) = record
        if isinstance(words, str) and not labelled and words.strip():
            return _plain_sentence(place, words)
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

    def unlabelled(self, path: Path) -> str | None:
        """Return a message if `path` has no tags, or only values such as -1.

        See `Task.unlabelled`, and `NO_LABELS` for the values that replace withheld tags.
        """
        try:
            records = self._records(path, labelled=True)
            tags = {str(tag) for record in records for tag in record.values[1] or [None]}
        except NoField as error:
            if error.field != self.fields[1] and content_suffix(path) in ROWS:
                raise
            return str(error)
        if tags <= NO_LABELS and not tags & set(self._names()):
            return f"{path}: the tags are {', '.join(sorted(tags))} everywhere"
        return None

    def learn(self, examples: Sequence[Sentence]) -> None:
        """Read the tags from the training part, unless they are known."""
        if self.labels is None:
            self.labels = Labels.of_values(tag for example in examples for tag in example.tags)
            self._choose_main()

    def weigh(self, examples: Sequence[Sentence]) -> str | None:
        """Compute the weights of the tags; see `Task.weigh`."""
        indices = (index for example in examples for index in self._indices(example))
        return self.weights.learn(self._names(), indices)

    def _indices(self, example: Sentence) -> list[int]:
        """Return the index of the tag of each word of an example."""
        assert self.labels is not None
        return [self.labels.index(tag, example.place) for tag in example.tags]

    def settings(self) -> dict[str, Any]:
        """Return the entries of ``config.json`` with the number and the names of the tags."""
        return label_settings(self._names())

    def _names(self) -> list[str]:
        assert self.labels is not None
        return self.labels.names

    def features(self, example: Sentence, tokenizer: ModelTokenizer) -> list[Feature]:
        """Encode a sentence as one sequence, or as several if it is long; see `Task.features`."""
        tags = self._indices(example)
        features = []
        for ids, first, places in tokenizer.encode_words(example.words):
            labels = [IGNORED] * len(ids)
            for number, place in enumerate(places):
                if tags:
                    labels[place] = tags[first + number]
            # The collator ignores the entry "places", the index of the first token of each word.
            feature = {"input_ids": ids, "token_type_ids": [0] * len(ids), "places": places}
            features.append({**feature, "labels": labels} if tags else feature)
        return features

    def collate(self, features: Sequence[Feature]) -> Batch:
        """Build a packed batch from sequences."""
        return self._collate(features)

    def output(self, model: Any, batch: Batch) -> Any:
        """Call a model with a batch, and compute the loss with the weights of the tags."""
        return self.weights.output(model, batch)

    def labels_in(self, features: Sequence[Feature]) -> float:
        """Return the number of words or, with class weights, the sum of the tags' weights."""
        if self.weights.values is None:
            return sum(len(feature["places"]) for feature in features)
        labels = (feature["labels"][place] for feature in features for place in feature["places"])
        return self.weights.total(labels)

    def rows(self, output: Any, lengths: list[int]) -> list[Tensor]:
        """Return the logits of each sequence, of shape ``(length, num_labels)``."""
        return list(output.logits.split(lengths))

    def _predicted(
        self, examples: Sequence[Sentence], features: Sequence[Feature], rows: Sequence[Tensor]
    ) -> list[list[int]]:
        """Return the index of the predicted tag of each word, for each example."""
        predicted: list[list[int]] = [[] for _ in examples]
        for feature, row in zip(features, rows, strict=True):
            predicted[feature["example"]] += row[feature["places"]].argmax(-1).tolist()
        return predicted

    def judge(
        self, examples: Sequence[Sentence], features: Sequence[Feature], rows: Sequence[Tensor]
    ) -> Judgement:
        """Compute the figures of words, and the figures of entities if the tags mark entities."""
        assert self.labels is not None
        names = self.labels.names
        predicted = self._predicted(examples, features, rows)
        expected = [self._indices(example) for example in examples]
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
        answers = []
        predicted = self._predicted(examples, features, rows)
        for example, indices in zip(examples, predicted, strict=True):
            tags = [names[index] for index in indices]
            answer: dict[str, Any] = {"words": example.words, "tags": tags}
            if metrics.have_entities(names):
                answer["entities"] = [_entity(example, *each) for each in metrics.entities(tags)]
            answers.append(answer)
        return answers

    def describe(self, figures: Figures) -> str:
        """Format the accuracy of words, and the F1 of entities or of the tags."""
        accuracy = f"accuracy of words {figures['accuracy']:.1%}"
        if "entities" not in figures:
            return f"{accuracy}, macro F1 {figures['macro_f1']:.1%}"
        return (
            f"entities: precision {figures['precision']:.1%}, recall {figures['recall']:.1%}, "
            f"F1 {figures['f1']:.1%}; {accuracy}"
        )


def _entity(example: Sentence | PlainSentence, kind: str, first: int, last: int) -> dict[str, Any]:
    words = example.words[first : last + 1]
    entity = {"type": kind, "words": words, "first": first}
    if isinstance(example, PlainSentence):
        start, end = example.starts[first], example.starts[last] + len(words[-1])
        entity |= {"text": example.text[start:end], "start": start, "end": end}
    return entity


def _plain_sentences(path: Path) -> list[PlainSentence]:
    lines = enumerate(read_text(path).split("\n"), start=1)
    sentences = [
        _plain_sentence(f"{path}, line {n}", line.strip()) for n, line in lines if line.strip()
    ]
    if not sentences:
        raise ValueError(f"{path}: the file has no sentence, allowed: at least one")
    return sentences


def _plain_sentence(place: str, text: str) -> PlainSentence:
    words = split_words(text)
    return PlainSentence(place, [w.text for w in words], [], text, [w.start for w in words])


def _is_word(word: Any) -> bool:
    return isinstance(word, str) and bool(word.strip())
