"""The page of an explanation: heat maps of the words, tables of the numbers, correlations."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from fastbert.analysis import page
from fastbert.analysis.explain import METHODS, Explanation


def number(value: float | None, digits: int = 4) -> str:
    """Format a value with `digits` decimals; None becomes a dash, and NaN "undefined"."""
    if value is None:
        return "–"
    return "undefined" if value != value else f"{value:.{digits}f}"


def write_page(explanation: Explanation, output: str | os.PathLike[str]) -> None:
    """Write an explanation as an HTML page of one file, which loads no other file.

    Args:
        explanation: The result of `explain`.
        output: A .html file, which appears complete or not at all.

    Raises:
        ValueError: If `output` has another suffix or is a folder.
        OSError: If the file cannot be written.
    """
    path = Path(output)
    page.check_output(path)
    page.write(path, html(explanation))


def html(explanation: Explanation) -> str:
    """Return the HTML page of an explanation as text.

    Args:
        explanation: The result of `explain`.

    Returns:
        The HTML text.
    """
    scores = sorted(explanation.scores.items(), key=lambda item: -item[1])
    return page.document(
        f"Explanations of the label {explanation.label}",
        [
            f"<p>{escape(_about(explanation))}</p>",
            page.table("Scores", ("label", "score"), [(k, number(v)) for k, v in scores]),
            *_maps(explanation),
            "<h2>Rank correlations of the methods</h2>",
            "<p>The correlations compare the absolute values of the words.</p>",
            _matrix("Spearman's correlation", explanation.spearman),
            _matrix("Kendall's τ-b", explanation.kendall),
            "<h2>All numbers</h2>",
            _numbers("Words", explanation.words, explanation, of_words=True),
            _numbers("Tokens", explanation.pieces, explanation, of_words=False),
        ],
    )


def _about(explanation: Explanation) -> str:
    difference = explanation.logit - explanation.baseline
    return (
        f"The logit of the label is {explanation.logit:.4f}. Integrated gradients took "
        f"{explanation.steps} steps from a baseline of padding, whose logit is "
        f"{explanation.baseline:.4f}. Their sum differs from the difference of the two logits, "
        f"{difference:.4f}, by {explanation.completeness_error:.2g}. Special tokens have "
        f"{explanation.special['attention']:.1%} of the attention and "
        f"{explanation.special['rollout']:.1%} of rollout."
    )


def _maps(explanation: Explanation) -> list[str]:
    parts = [
        "<h2>Heat maps of the words</h2>",
        "<p>A deeper colour means a larger share of the largest value. Orange words count for the "
        "label, and blue words against it. Attention and rollout have no sign.</p>",
    ]
    for name, attribution in explanation.attributions.items():
        parts.append(f"<h3>{escape(name)}</h3><p>{escape(METHODS[name])}</p>")
        parts.append(page.heat(explanation.words, attribution.words, explanation.second))
    return parts


def _matrix(caption: str, matrix: Mapping[str, Mapping[str, float]]) -> str:
    rows = [(name, *(number(v, 2) for v in row.values())) for name, row in matrix.items()]
    return page.table(caption, ("method", *matrix), rows)


def _numbers(
    caption: str, names: Sequence[str], explanation: Explanation, *, of_words: bool
) -> str:
    columns = [a.words if of_words else a.pieces for a in explanation.attributions.values()]
    rows = [(name, *map(number, row)) for name, *row in zip(names, *columns, strict=True)]
    return page.table(caption, ("text", *explanation.attributions), rows)
