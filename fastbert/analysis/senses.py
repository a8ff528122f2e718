"""Predict the sense of a word from the vector of the word in its context."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.analysis.occurrences import ContextEncoder, places
from fastbert.data.records import read_records

# 156 sentences that were written for this test: six words with two or three senses each, and 12
# sentences for each sense.
SENTENCES = Path(__file__).with_name("senses.jsonl")


class Usage(NamedTuple):
    """A word in a text.

    Attributes:
        word: The word, in upper or lower case.
        sense: Name of the sense that the word has in the text.
        text: A text that contains the word.
    """

    word: str
    sense: str
    text: str


@dataclass(frozen=True)
class SenseAccuracy:
    """The share of usages whose sense is predicted correctly, on held-out sentences.

    Attributes:
        layers: Accuracy by layer; 0 is the embedding output.
        by_word: Accuracy by word and layer.
        most_frequent: Accuracy of a prediction without vectors: each word gets the sense that is
            most frequent in the sentences that are not held out.
        sentences: Number of sentences.
        senses: Number of senses of each word.
        folds: Number of parts of the cross-validation.
    """

    layers: list[float]
    by_word: dict[str, list[float]]
    most_frequent: float
    sentences: int
    senses: dict[str, int]
    folds: int


def read_usages(path: str | os.PathLike[str] = SENTENCES) -> list[Usage]:
    """Read labelled usages of words.

    Args:
        path: A .jsonl, .csv, .tsv or .parquet file with the fields ``word``, ``sense`` and
            ``text``. The default is a file of this package, ``senses.jsonl``.

    Returns:
        The usages.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a value is missing or blank. The message names the file and the line.
    """
    usages = []
    for place, values in read_records(Path(path), Usage._fields):
        if not all(isinstance(value, str) and value.strip() for value in values):
            raise ValueError(f"{place}: got {values!r:.200}, allowed: word, sense and text")
        usages.append(Usage(*values))
    return usages


def nearest_centroids(train: Tensor, labels: Sequence[str], test: Tensor) -> list[str]:
    """Give each vector in `test` the label whose mean vector in `train` is nearest.

    Args:
        train: Vectors of shape ``(N, H)``.
        labels: The labels of the N vectors in `train`.
        test: Vectors of shape ``(M, H)``.

    Returns:
        The labels of the M vectors in `test`.

    Examples:
        >>> import torch
        >>> from fastbert.analysis import nearest_centroids
        >>> train = torch.tensor([[0.0, 0.0], [0.0, 2.0], [5.0, 1.0]])
        >>> nearest_centroids(train, ["a", "a", "b"], torch.tensor([[1.0, 1.0], [4.0, 0.0]]))
        ['a', 'b']
    """
    names = sorted(set(labels))
    rows = torch.tensor([names.index(label) for label in labels])
    centroids = torch.stack([train[rows == i].mean(0) for i in range(len(names))])
    return [names[i] for i in torch.cdist(test, centroids).argmin(1).tolist()]


def folds_of(usages: Sequence[Usage], folds: int) -> list[int]:
    """Divide usages into folds, so that each sense is distributed evenly over the folds.

    Args:
        usages: Labelled usages of words.
        folds: Number of folds.

    Returns:
        The fold of each usage, from 0.

    Raises:
        ValueError: If a sense has fewer than `folds` usages, or if `folds` is below 2.
    """
    counts = Counter((usage.word, usage.sense) for usage in usages)
    fewest = min(counts.values(), default=0)
    if not 2 <= folds <= fewest:
        raise ValueError(
            f"folds: got {folds}, allowed: from 2 to {fewest}, the usages of the rarest sense"
        )
    seen: Counter[tuple[str, str]] = Counter()
    lists = []
    for usage in usages:
        key = (usage.word, usage.sense)
        lists.append(seen[key] % folds)
        seen[key] += 1
    return lists


def sense_accuracy(
    model: str | os.PathLike[str] | ContextEncoder,
    usages: Sequence[Usage] | None = None,
    *,
    folds: int = 4,
) -> SenseAccuracy:
    """Predict the sense of each word by the nearest centroid, for each layer.

    The usages are divided into folds, and each fold is held out once. A centroid is the mean vector
    of the usages of a sense in the folds that are not held out. The embedding output depends on the
    word and its position only, so its accuracy shows the accuracy without context.

    Args:
        model: Folder or hub id of an encoder, or a loaded `ContextEncoder`.
        usages: Labelled usages; None takes the usages of ``senses.jsonl`` in this package.
        folds: Number of folds.

    Returns:
        The accuracy by layer, by word and layer, and of the prediction of the most frequent sense.

    Raises:
        ValueError: If a text does not have its word as a whole word, if a sense has fewer than
            `folds` usages, or if `folds` is below 2.

    Note:
        Coenen et al. 2019, section 4.1, with centroids as in Peters et al. 2018.
    """
    encoder = model if isinstance(model, ContextEncoder) else ContextEncoder(model)
    usages = read_usages() if usages is None else list(usages)
    fold = folds_of(usages, folds)
    vectors = usage_vectors(encoder, usages)
    by_word = {}
    most_frequent = 0.0
    words = list(dict.fromkeys(usage.word for usage in usages))
    for word in words:
        rows = [i for i, usage in enumerate(usages) if usage.word == word]
        senses = [usages[i].sense for i in rows]
        own = [fold[i] for i in rows]
        by_word[word] = [_accuracy(v, senses, own) for v in vectors[rows].unbind(1)]
        most_frequent += _majority(senses, own) * len(rows) / len(usages)
    shares = [sum(u.word == word for u in usages) / len(usages) for word in words]
    layers = [
        sum(s * row for s, row in zip(shares, column, strict=True))
        for column in zip(*by_word.values(), strict=True)
    ]
    counts = {word: len({u.sense for u in usages if u.word == word}) for word in words}
    return SenseAccuracy(layers, by_word, most_frequent, len(usages), counts, folds)


def usage_vectors(encoder: ContextEncoder, usages: Sequence[Usage]) -> Tensor:
    """Compute the vector of the first occurrence of each usage's word in its text.

    Args:
        encoder: The encoder that computes the vectors.
        usages: N usages.

    Returns:
        Vectors of shape ``(N, states, H)``.

    Raises:
        ValueError: If a text does not have its word as a whole word.
    """
    texts = [encoder.split(usage.text) for usage in usages]
    indices = []
    for usage, pieces in zip(usages, texts, strict=True):
        positions = places(pieces, usage.word)
        if not positions:
            raise ValueError(f"text: got {usage.text!r:.200}, allowed: a text with {usage.word!r}")
        indices.append(positions[0])
    states = encoder.words(texts)
    return torch.stack([rows[:, i] for rows, i in zip(states, indices, strict=True)])


def _accuracy(vectors: Tensor, senses: Sequence[str], fold: Sequence[int]) -> float:
    """Return the accuracy of nearest centroids for vectors ``(N, H)``."""
    right = 0
    for part in set(fold):
        held = [i for i, f in enumerate(fold) if f == part]
        training = [i for i, f in enumerate(fold) if f != part]
        predicted = nearest_centroids(
            vectors[training], [senses[i] for i in training], vectors[held]
        )
        right += sum(a == senses[i] for a, i in zip(predicted, held, strict=True))
    return right / len(senses)


def _majority(senses: Sequence[str], fold: Sequence[int]) -> float:
    """Return the accuracy if each fold is given the most frequent sense of the other folds."""
    right = 0
    for part in set(fold):
        counts = Counter(s for s, f in zip(senses, fold, strict=True) if f != part)
        most = max(sorted(counts), key=counts.__getitem__)
        right += sum(s == most for s, f in zip(senses, fold, strict=True) if f == part)
    return right / len(senses)
