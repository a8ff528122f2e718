"""The figures by which fine-tuned models are evaluated, such as accuracy and F1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Figures = dict[str, Any]


def confusion_matrix(
    expected: NDArray[np.int64], predicted: NDArray[np.int64], labels: int
) -> NDArray[np.int64]:
    """Count the examples for each pair of an expected label (row) and a predicted one (column).

    Args:
        expected: The labels in the data, int64 of shape ``(N,)``.
        predicted: The labels of the model, int64 of shape ``(N,)``.
        labels: Number C of labels.

    Returns:
        The counts, int64 of shape ``(C, C)``.
    """
    flat = np.bincount(expected * labels + predicted, minlength=labels * labels)
    return flat.reshape(labels, labels)


def classification(matrix: NDArray[np.int64], names: Sequence[str]) -> Figures:
    """Compute the figures of a classification.

    Args:
        matrix: The confusion matrix, int64 of shape ``(C, C)``.
        names: The names of the labels.

    Returns:
        ``accuracy``; ``macro_f1``, the mean of the F1 of all labels that are expected or predicted;
        ``matthews_correlation`` (Gorodkin 2004); and ``labels`` with ``precision``, ``recall``,
        ``f1`` and ``support`` by name. A quotient whose denominator is 0 is 0.
    """
    hits, support, chosen = np.diag(matrix), matrix.sum(1), matrix.sum(0)
    total = int(matrix.sum())
    by_name = {
        name: {**_scores(int(hits[i]), int(chosen[i]), int(support[i])), "support": int(support[i])}
        for i, name in enumerate(names)
    }
    f1 = [by_name[name]["f1"] for i, name in enumerate(names) if support[i] + chosen[i]]
    # Counts are converted to floats, because the product of two int64 may overflow.
    s, t, p = float(total), support.astype(float), chosen.astype(float)
    covariance = float(hits.sum()) * s - float(t @ p)
    spread = ((s * s - float(p @ p)) * (s * s - float(t @ t))) ** 0.5
    return {
        "accuracy": float(hits.sum()) / total,
        "macro_f1": sum(f1) / len(f1),
        "matthews_correlation": covariance / spread if spread else 0.0,
        "labels": by_name,
    }


def multi_label(
    expected: NDArray[np.bool_], predicted: NDArray[np.bool_], names: Sequence[str]
) -> Figures:
    """Compute the figures of a classification by any number of labels.

    Args:
        expected: Whether an example has a label in the data, of shape ``(N, C)``.
        predicted: Whether the model gives a label to an example, of shape ``(N, C)``.
        names: The names of the labels.

    Returns:
        ``micro_f1``, ``micro_precision`` and ``micro_recall`` over all pairs of an example and a
        label; ``macro_f1``, the mean of the F1 of all labels that are expected or predicted;
        ``subset_accuracy``, the share of the examples whose labels are all right; and ``labels``
        with ``precision``, ``recall``, ``f1`` and ``support`` by name. A quotient whose denominator
        is 0 is 0.
    """
    hits, support, chosen = (expected & predicted).sum(0), expected.sum(0), predicted.sum(0)
    by_name = {
        name: {**_scores(int(hits[i]), int(chosen[i]), int(support[i])), "support": int(support[i])}
        for i, name in enumerate(names)
    }
    f1 = [by_name[name]["f1"] for i, name in enumerate(names) if support[i] + chosen[i]]
    micro = _scores(int(hits.sum()), int(chosen.sum()), int(support.sum()))
    return {
        **{f"micro_{name}": value for name, value in micro.items()},
        "macro_f1": sum(f1) / max(1, len(f1)),
        "subset_accuracy": float((expected == predicted).all(1).mean()),
        "labels": by_name,
    }


def regression(expected: NDArray[np.float64], predicted: NDArray[np.float64]) -> Figures:
    """Compute the figures of a regression.

    Args:
        expected: The numbers in the data, float64 of shape ``(N,)``.
        predicted: The numbers of the model, float64 of shape ``(N,)``.

    Returns:
        ``mean_squared_error``, and the correlations ``pearson`` and ``spearman``, which are 0 if
        `expected` or `predicted` is constant.
    """
    return {
        "mean_squared_error": float(np.mean((expected - predicted) ** 2)),
        "pearson": _correlation(expected, predicted),
        "spearman": _correlation(_ranks(expected), _ranks(predicted)),
    }


def _correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    first, second = first - first.mean(), second - second.mean()
    spread = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / spread if spread else 0.0


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rank of each value; equal values have the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place.reshape(-1)]


# The names and functions from here to `entity_scores` are for the classification of words.

# A tag of one letter, such as B, marks entities of a type without a name.
ENTITY = re.compile(r"([BIESLU])(?:-(.+))?$", re.DOTALL)
# The figures use this name for the type of the entities that tags of one letter mark.
UNNAMED = "entity"
Entity = tuple[str, int, int]


def have_entities(names: Sequence[str]) -> bool:
    """Return whether all tags are of the kinds that mark entities: ``O``, ``B-PER`` or ``B``."""
    others = set(names) - {"O"}
    if not others or not all(map(ENTITY.match, others)):
        return False
    # Without ``O`` and ``B``, tags of one letter may be classes of words, not marks of entities.
    bare = any("-" not in name for name in others)
    return not bare or ("O" in names and "B" in others)


def entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities that the tags of a sentence mark.

    An entity ends before a tag of another type, before ``O``, ``B``, ``S`` and ``U``, and after
    ``E``, ``L``, ``S`` and ``U``. An ``I`` without a ``B`` begins an entity. The script conlleval
    and the default mode of seqeval find the same entities.

    Args:
        tags: The tags of the words.

    Returns:
        The type of each entity, and the indices of its first word and its last word, in order.

    Examples:
        >>> from fastbert.finetuning.metrics import entities
        >>> entities(["B-PER", "I-PER", "O", "I-LOC"])
        [('PER', 0, 1), ('LOC', 3, 3)]
    """
    spans: list[Entity] = []
    kind, start, open_ = "", 0, False
    for index, tag in enumerate([*tags, "O"]):
        match = ENTITY.match(tag)
        prefix, this = (match[1], match[2] or UNNAMED) if match else ("O", "")
        begins = prefix != "O" and (not open_ or this != kind or prefix in "BSU")
        if open_ and (begins or prefix == "O"):
            spans.append((kind, start, index - 1))
            open_ = False
        if begins:
            kind, start, open_ = this, index, True
        if open_ and prefix in "ELSU":
            spans.append((kind, start, index))
            open_ = False
    return spans


def entity_scores(expected: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> Figures:
    """Compute precision, recall and F1 of entities (Tjong Kim Sang and De Meulder 2003).

    An entity is right if its type, its first word and its last word are right.

    Args:
        expected: The tags of the words of each sentence in the data.
        predicted: The tags of the model.

    Returns:
        ``precision``, ``recall`` and ``f1`` over all entities, and ``entities`` with the same
        figures and ``support`` by type. A quotient whose denominator is 0 is 0.
    """
    right: Counter[str] = Counter()
    there: Counter[str] = Counter()
    chosen: Counter[str] = Counter()
    for wanted, given in zip(expected, predicted, strict=True):
        truth, guess = set(entities(wanted)), set(entities(given))
        there.update(kind for kind, _, _ in truth)
        chosen.update(kind for kind, _, _ in guess)
        right.update(kind for kind, _, _ in truth & guess)
    by_type = {
        kind: {**_scores(right[kind], chosen[kind], there[kind]), "support": there[kind]}
        for kind in sorted(there | chosen)
    }
    return {**_scores(right.total(), chosen.total(), there.total()), "entities": by_type}


def _scores(right: int, chosen: int, there: int) -> dict[str, float]:
    precision = right / chosen if chosen else 0.0
    recall = right / there if there else 0.0
    both = precision + recall
    f1 = 2 * precision * recall / both if both else 0.0
    return {"precision": precision, "recall": recall, "f1": f1}


# The names and functions from here on are for answers to questions.

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normal_words(text: str) -> list[str]:
    """Return the words of an answer in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(answer: str, truths: Sequence[str]) -> float:
    """Return 1 if an answer equals one of the right answers, else 0 (Rajpurkar et al. 2016).

    Args:
        answer: The answer of the model; an empty text means that it gives no answer.
        truths: The right answers; empty means that the question has no answer.

    Returns:
        The score.
    """
    return max(float(normal_words(answer) == normal_words(truth)) for truth in truths or [""])


def word_f1(answer: str, truths: Sequence[str]) -> float:
    """Return the largest F1 between the words of an answer and the words of a right answer.

    Args:
        answer: The answer of the model; an empty text means that it gives no answer.
        truths: The right answers; empty means that the question has no answer.

    Returns:
        The score, in [0, 1].
    """
    return max(_word_f1(normal_words(answer), normal_words(truth)) for truth in truths or [""])


def _word_f1(answer: list[str], truth: list[str]) -> float:
    if not answer or not truth:
        return float(answer == truth)
    shared = (Counter(answer) & Counter(truth)).total()
    return _scores(shared, len(answer), len(truth))["f1"]
