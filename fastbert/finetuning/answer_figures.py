"""The figures of SQuAD 2.0's evaluation script (Rajpurkar et al. 2018), as fractions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastbert.finetuning.metrics import Figures, exact_match, normal_words, word_f1


def answer_figures(
    answers: Sequence[str],
    candidates: Sequence[str],
    differences: Sequence[float],
    truths: Sequence[Sequence[str]],
) -> Figures:
    """Compute the figures of the answers to questions, some of which may have no answer.

    Args:
        answers: The model's answer to each question; an empty text means that it gives no answer.
        candidates: The model's best non-empty answer to each question.
        differences: The score of no answer minus the score of the candidate, for each question.
        truths: The right answers to each question; an empty list means that the question has no
            answer.

    Returns:
        ``exact_match`` (called ``exact`` in the script) and ``f1`` of all questions. If at least
        one question has no answer, there are more figures. ``NoAns_exact`` and ``NoAns_f1`` are for
        the ``NoAns_total`` questions without an answer. ``HasAns_exact`` and ``HasAns_f1`` are for
        the ``HasAns_total`` other questions, if there are any. ``best_exact`` and ``best_f1`` are
        the largest figures that any threshold reaches, and ``best_exact_thresh`` and
        ``best_f1_thresh`` are these thresholds. With a threshold, the answer to a question is the
        candidate if the difference is at most the threshold, and empty otherwise.
    """
    scores = {"exact": exact_match, "f1": word_f1}
    kinds = {
        "HasAns": [i for i, truth in enumerate(truths) if truth],
        "NoAns": [i for i, truth in enumerate(truths) if not truth],
    }
    # As in the script, right answers that consist of articles and punctuation are left out.
    wanted = [[text for text in truth if normal_words(text)] for truth in truths]
    figures: Figures = {}
    grouped: Figures = {}
    best: Figures = {}
    for name, score in scores.items():
        given = [score(said, truth) for said, truth in zip(answers, wanted, strict=True)]
        figures[{"exact": "exact_match"}.get(name, name)] = sum(given) / len(given)
        for kind, chosen in kinds.items():
            if chosen:
                grouped[f"{kind}_{name}"] = sum(given[i] for i in chosen) / len(chosen)
                grouped[f"{kind}_total"] = len(chosen)
        answered = [score(said, truth) for said, truth in zip(candidates, wanted, strict=True)]
        value, threshold = _best_threshold(answered, differences, [not truth for truth in truths])
        best |= {f"best_{name}": value, f"best_{name}_thresh": threshold}
    return {**figures, **grouped, **best} if kinds["NoAns"] else figures


def _best_threshold(
    answered: Sequence[float], differences: Sequence[float], empty: Sequence[bool]
) -> tuple[float, float]:
    """Return the best mean score, and the smallest difference that reaches it as the threshold.

    If it is best to give no answer at all, the threshold is just below the smallest difference. The
    script of SQuAD gives 0 in this case, because the differences in the script are probabilities.

    Args:
        answered: Score of each question if the candidate is given as the answer, in [0, 1].
        differences: The score of no answer minus the score of the candidate, for each question. The
            candidate is given if this difference is at most the threshold.
        empty: Whether a question has no answer, so that its score is 1 if no answer is given.
    """
    order = sorted(range(len(differences)), key=differences.__getitem__)
    total = best = float(sum(empty))
    threshold = math.nextafter(differences[order[0]], -math.inf)
    for place, index in enumerate(order):
        total += answered[index] - empty[index]
        following = order[place + 1] if place + 1 < len(order) else None
        # No threshold separates two questions with the same difference.
        together = following is not None and differences[following] == differences[index]
        if total > best and not together:
            best, threshold = total, differences[index]
    return best / len(order), threshold
