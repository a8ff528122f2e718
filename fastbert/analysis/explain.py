"""Explanations of one prediction by five methods, with the rank correlations of the methods."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastbert.analysis.agreement import kendall, spearman
from fastbert.analysis.rollout import rollout
from fastbert.analysis.subject import TOKENS_PER_BATCH, Pieces, Subject

METHODS = {
    "gradient × input": "the gradient of the logit by the word embedding, times the embedding",
    "integrated gradients": "that gradient, averaged on the way from padding to the text",
    "attention": "the weights of the token that the head reads, in the last layer (mean of heads)",
    "rollout": "the weights of that token through all layers and residual connections",
    "leave-one-out": "the fall of the logit when the token or the word is removed",
}
# Smallest number of words of a rank correlation; with fewer words, a ranking has no meaning.
FEWEST = 3


@dataclass(frozen=True)
class Attribution:
    """The values that one method gives to the tokens and words of a text.

    Attributes:
        pieces: A value for each token, special tokens included. Leave-one-out has None for special
            tokens, because it removes no special tokens.
        words: A value for each word: the sum of the values of its tokens, or for leave-one-out the
            fall of the logit when the whole word is removed.
    """

    pieces: list[float | None]
    words: list[float]


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`.

    Attributes:
        text: The text, or the first text of a pair.
        label: Name of the label that is explained.
        scores: The softmax of the logits, by label. For a model with one label, the score is the
            logit itself.
        logit: The logit of the label, which all methods except attention and rollout explain.
        pieces: The tokens, special tokens included.
        words: The words of both texts.
        word_of: Index of the word of each token; None for special tokens.
        attributions: Values by method, in the order of ``METHODS``.
        steps: Number of steps of integrated gradients.
        baseline: The logit of the baseline of integrated gradients.
        completeness_error: Sum of integrated gradients over all tokens, minus the difference of
            `logit` and `baseline`. This error tends to 0 with more steps.
        special: Share of the attention, and of rollout, on special tokens.
        spearman: Spearman's correlation of the words' absolute values, for each pair of methods.
        kendall: Kendall's τ-b of the words' absolute values, for each pair of methods.
        pair: The second text of a pair, or None.
        second: Index in `words` of the first word of the second text; None without a pair.
    """

    text: str
    label: str
    scores: dict[str, float]
    logit: float
    pieces: list[str]
    words: list[str]
    word_of: list[int | None]
    attributions: dict[str, Attribution]
    steps: int
    baseline: float
    completeness_error: float
    special: dict[str, float]
    spearman: dict[str, dict[str, float]] = field(default_factory=dict)
    kendall: dict[str, dict[str, float]] = field(default_factory=dict)
    pair: str | None = None
    second: int | None = None


def explain(
    model: str | os.PathLike[str] | Subject,
    text: str,
    pair: str | None = None,
    *,
    target: str | None = None,
    steps: int = 50,
) -> Explanation:
    """Explain the prediction of a classifier by five methods.

    Args:
        model: Folder or hub id of a classifier, or a loaded `Subject`.
        text: The text, or the first text of a pair.
        pair: The second text of a pair, or None.
        target: Name of the label to explain; None explains the predicted label.
        steps: Number of steps of integrated gradients.

    Returns:
        The values of each token and word, and the rank correlations of the methods.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If `steps` is below 1, if a text is blank or has no tokens, if there are more
            tokens than the model has positions, if the label is unknown, or if the model has no
            classification head, returns no attention weights or has a default prompt.
        ImportError: If Captum is not installed.

    Note:
        Simonyan et al. 2013 and Shrikumar et al. 2016 (gradient × input), Sundararajan et al. 2017
        (integrated gradients), Abnar and Zuidema 2020 (rollout), Jain and Wallace 2019
        (leave-one-out, and Kendall's τ between attention and gradients).
    """
    if steps < 1:
        raise ValueError(f"steps: got {steps}, allowed: at least 1")
    subject = model if isinstance(model, Subject) else Subject.load(model)
    pieces = subject.split(text, pair)
    # A model without attention is refused before the longer computations.
    weights = subject.attentions(pieces.ids, pieces.types)
    logits = subject.logits([pieces.ids], [pieces.types])[0]
    index = subject.target(target, logits)
    gradients = _gradient_times_input(subject, pieces, index)
    integrated, baseline, error = integrated_gradients(subject, pieces, index, steps)
    read = subject.reading(weights[-1].mean(1)[0]).tolist()
    rolled = subject.reading(rollout(weights)[0]).tolist()
    values = (gradients, integrated, read, rolled)
    attributions = {
        name: Attribution(list(row), joined(row, pieces))
        for name, row in zip(METHODS, values, strict=False)
    }
    attributions["leave-one-out"] = _leave_one_out(subject, pieces, index, float(logits[index]))
    outside = [i for i, word in enumerate(pieces.word_of) if word is None]
    return Explanation(
        text=text,
        label=subject.labels[index],
        scores=_scores(subject.labels, logits),
        logit=float(logits[index]),
        pieces=pieces.pieces,
        words=pieces.words,
        word_of=pieces.word_of,
        attributions=attributions,
        steps=steps,
        baseline=baseline,
        completeness_error=error,
        special={
            "attention": sum(read[i] for i in outside),
            "rollout": sum(rolled[i] for i in outside),
        },
        spearman=correlations(attributions, spearman),
        kendall=correlations(attributions, kendall),
        pair=pair,
        second=pieces.second,
    )


def _scores(labels: list[str], logits: Tensor) -> dict[str, float]:
    scores = logits if len(labels) == 1 else logits.softmax(-1)
    return dict(zip(labels, scores.tolist(), strict=True))


def joined(values: Sequence[float], pieces: Pieces) -> list[float]:
    """Return the sum of the values of each word's tokens."""
    sums = [0.0] * len(pieces.words)
    for value, word in zip(values, pieces.word_of, strict=True):
        if word is not None:
            sums[word] += value
    return sums


def correlations(
    attributions: dict[str, Attribution], correlate: Callable[[Tensor, Tensor], float]
) -> dict[str, dict[str, float]]:
    """Correlate the absolute values of the words, for each pair of methods.

    Args:
        attributions: Values by method.
        correlate: The function `spearman` or the function `kendall`.

    Returns:
        The correlations by the names of both methods; NaN for fewer than three words, or if all
        words have the same absolute value by one of the methods.
    """
    sizes = {
        name: torch.tensor(a.words, dtype=torch.float64).abs() for name, a in attributions.items()
    }
    few = any(len(size) < FEWEST for size in sizes.values())
    return {
        a: {b: math.nan if few else correlate(sizes[a], sizes[b]) for b in sizes} for a in sizes
    }


def _gradient_times_input(subject: Subject, pieces: Pieces, index: int) -> list[float]:
    embeddings = subject.embed(pieces.ids).requires_grad_()
    logit = subject.from_embeddings(embeddings, pieces.types).logits[0, index]
    (gradient,) = torch.autograd.grad(logit, embeddings)
    return (gradient * embeddings.detach())[0].sum(-1).tolist()


def integrated_gradients(
    subject: Subject, pieces: Pieces, index: int, steps: int
) -> tuple[list[float], float, float]:
    """Compute integrated gradients with the library Captum.

    The baseline has the embedding of padding in place of each token of the text, or zeros if the
    model has no padding token. Special tokens keep their embeddings.

    Args:
        subject: The classifier.
        pieces: The tokens of the text.
        index: Index of the label whose logit is explained.
        steps: Number of interpolation steps from the baseline to the text.

    Returns:
        A value for each token, the logit of the baseline, and the completeness error.

    Raises:
        ImportError: If Captum is not installed.
    """
    try:
        from captum.attr import IntegratedGradients
    except ImportError as error:
        raise ImportError(
            f"integrated gradients need Captum ({error}): pip install 'fastbert[analysis]'"
        ) from error

    def logit(embeddings: Tensor) -> Tensor:
        return subject.from_embeddings(embeddings, pieces.types).logits[:, index]

    embeddings = subject.embed(pieces.ids)
    start = embeddings.clone()
    pad = getattr(subject.model.config, "pad_token_id", None)
    start[:, pieces.inside] = 0.0 if pad is None else subject.embed([pad])
    values = IntegratedGradients(logit).attribute(
        embeddings,
        baselines=start,
        n_steps=steps,
        internal_batch_size=max(1, TOKENS_PER_BATCH // len(pieces.ids)),
    )
    values = values[0].double().sum(-1)
    with torch.no_grad():
        first, last = (float(logit(x)[0]) for x in (start, embeddings))
    return values.tolist(), first, float(values.sum()) - (last - first)


def _leave_one_out(subject: Subject, pieces: Pieces, index: int, logit: float) -> Attribution:
    """Return how much the logit falls if one token, or one word, is removed."""
    groups = [[i] for i in pieces.inside]
    groups += [pieces.of_word(word) for word in range(len(pieces.words))]
    without, types = (
        [[t for i, t in enumerate(row) if i not in group] for group in groups]
        for row in (pieces.ids, pieces.types)
    )
    falls = (logit - subject.logits(without, types)[:, index]).tolist()
    by_piece: list[float | None] = [None] * len(pieces.ids)
    for place, fall in zip(pieces.inside, falls, strict=False):
        by_piece[place] = fall
    return Attribution(by_piece, falls[len(pieces.inside) :])
