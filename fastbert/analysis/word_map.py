"""A two-dimensional map of the occurrences of one word in texts, as an HTML page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from fastbert.analysis import page
from fastbert.analysis.occurrences import ContextEncoder, places
from fastbert.data.sentences import split_sentences
from fastbert.text_file import read_text

WIDTH, HEIGHT, MARGIN = 800, 500, 25
# Largest number of points; readers cannot tell more points apart.
MOST = 500


@dataclass(frozen=True)
class Occurrence:
    """An occurrence of a word.

    Attributes:
        place: Name of the file that contains the sentence.
        text: The sentence that contains the word.
        x: First coordinate of the word's vector.
        y: Second coordinate of the word's vector.
    """

    place: str
    text: str
    x: float
    y: float


@dataclass(frozen=True)
class WordMap:
    """The result of `word_map`.

    Attributes:
        word: The word whose occurrences are in the map.
        layer: Number of the state: 0 is the embedding output, and N the output of layer N.
        occurrences: The occurrences in the order of the texts.
        explained: Share of the vectors' variance in each of the two dimensions of the map.
        found: Number of sentences with the word that fit the model's positions. At most ``MOST`` of
            these sentences are in `occurrences`.
        too_long: Number of sentences with more tokens than the model has positions, among the
            sentences that contain the word, as a whole word or inside another word.
    """

    word: str
    layer: int
    occurrences: list[Occurrence]
    explained: tuple[float, float]
    found: int
    too_long: int


def project(vectors: Tensor) -> tuple[Tensor, tuple[float, float]]:
    """Project vectors on their first two principal components.

    Args:
        vectors: Vectors of shape ``(N, H)``, where N and H are at least 2.

    Returns:
        Coordinates of shape ``(N, 2)``, and the share of the variance of each component. The sign
        of a component makes the coordinate with the largest absolute value positive.

    Raises:
        ValueError: If `vectors` is not two-dimensional, or if N or H is below 2.
    """
    if vectors.dim() != 2 or min(vectors.shape) < 2:
        raise ValueError(
            f"vectors: got the shape {tuple(vectors.shape)}, allowed: at least two vectors (N, H)"
        )
    centred = vectors.double() - vectors.double().mean(0)
    left, sizes, _ = torch.linalg.svd(centred, full_matrices=False)
    points = left[:, :2] * sizes[:2]
    largest = points.gather(0, points.abs().argmax(0, keepdim=True))
    points = points * torch.where(largest < 0, -1.0, 1.0)
    total = sizes.square().sum()
    shares = sizes[:2].square() / total if total > 0 else torch.zeros(2)
    return points, (float(shares[0]), float(shares[1]))


def word_map(
    model: str | os.PathLike[str] | ContextEncoder,
    texts: str | os.PathLike[str],
    word: str,
    *,
    layer: int = -1,
) -> WordMap:
    """Compute a map of the sentences that have a word.

    Args:
        model: Folder or hub id of an encoder, or a loaded `ContextEncoder`.
        texts: A .txt file, or a folder whose .txt files are read, subfolders included.
        word: The word, which is found in upper and lower case.
        layer: Number of the state whose vectors are projected; 0 is the embedding output, and a
            negative number counts from the last layer.

    Returns:
        The map. Of more than 500 sentences, 500 evenly spaced sentences are taken.

    Raises:
        FileNotFoundError: If the model or the texts do not exist.
        ValueError: If the word is not one word, if there is no .txt file, if fewer than two
            sentences have the word, or if the model has no state with the number `layer`.
    """
    if len(word.split()) != 1:
        raise ValueError(f"word: got {word!r}, allowed: one word")
    files = _files(Path(texts))
    encoder = model if isinstance(model, ContextEncoder) else ContextEncoder(model)
    number = encoder.layer(layer)
    occurrences, too_long = [], 0
    for place, sentence in _sentences(files, word):
        try:
            pieces = encoder.split(sentence)
        except ValueError:
            too_long += 1
            continue
        if index := places(pieces, word)[:1]:
            occurrences.append((place, pieces, index[0]))
    if len(occurrences) < 2:
        raise ValueError(
            f"word: got {word!r}, which {len(occurrences)} sentences of {texts} have as a whole "
            "word, allowed: a word in at least two"
        )
    step = max(1.0, len(occurrences) / MOST)
    chosen = [occurrences[int(i * step)] for i in range(min(MOST, len(occurrences)))]
    states = encoder.words([pieces for _, pieces, _ in chosen])
    rows = [s[number, i] for s, (_, _, i) in zip(states, chosen, strict=True)]
    points, explained = project(torch.stack(rows))
    matches = [
        Occurrence(place, pieces.text, x, y)
        for (place, pieces, _), (x, y) in zip(chosen, points.tolist(), strict=True)
    ]
    return WordMap(word, number, matches, explained, len(occurrences), too_long)


def _files(texts: Path) -> list[Path]:
    if not texts.exists():
        raise FileNotFoundError(f"texts: {texts} does not exist, allowed: a .txt file or a folder")
    files = sorted(texts.rglob("*.txt")) if texts.is_dir() else [texts]
    if not files or files[0].suffix.lower() != ".txt":
        raise ValueError(f"texts: got {str(texts)!r}, allowed: a .txt file or a folder of them")
    return files


def _sentences(files: Sequence[Path], word: str) -> Iterator[tuple[str, str]]:
    """Yield the name of the file and the text of each sentence that may have the word."""
    for path in files:
        for sentence in split_sentences(read_text(path)):
            if word.lower() in sentence.lower():
                yield path.name, sentence


def write_map(result: WordMap, output: str | os.PathLike[str]) -> None:
    """Write a map as an HTML page of one file, which loads no other file.

    The sentence of a point appears when the mouse is on the point or when the point has the focus.
    The arrow keys move the focus. A table lists all sentences of the map.

    Args:
        result: The result of `word_map`.
        output: A .html file, which appears complete or not at all.

    Raises:
        ValueError: If `output` has another suffix or is a folder.
        OSError: If the file cannot be written.
    """
    path = Path(output)
    page.check_output(path)
    page.write(path, html(result))


_SCRIPT = """
const points = [...document.querySelectorAll("circle")];
const told = document.querySelector("output");
const show = point => { told.textContent = point.getAttribute("aria-label"); };
for (const [i, point] of points.entries()) {
  point.addEventListener("mouseenter", () => show(point));
  point.addEventListener("focus", () => show(point));
  point.addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    if (!step) return;
    event.preventDefault();
    const next = points[(i + step + points.length) % points.length];
    point.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });
}
"""


def html(result: WordMap) -> str:
    """Return the HTML page of a map as text.

    Args:
        result: The result of `word_map`.

    Returns:
        The HTML text.
    """
    first, second = result.explained
    count = len(result.occurrences)
    cut = f" of {result.found}" if result.found > count else ""
    about = (
        f"{count}{cut} sentences have the word. A point is the vector of the word in one sentence, "
        f"from state {result.layer} (0 is the embedding output). The two principal components have "
        f"{first:.1%} and {second:.1%} of the variance. {result.too_long} sentences were too long."
    )
    rows = [
        (
            str(i + 1),
            occurrence.text,
            occurrence.place,
            f"{occurrence.x:.2f}",
            f"{occurrence.y:.2f}",
        )
        for i, occurrence in enumerate(result.occurrences)
    ]
    return page.document(
        f"The word {result.word} in {count} sentences",
        [
            f"<p>{escape(about)}</p>",
            "<p>Move the mouse over a point, or focus a point and use the arrow keys.</p>",
            _picture(result),
            '<output aria-live="polite"></output>',
            page.table("All sentences", ("number", "sentence", "file", "x", "y"), rows),
        ],
        _SCRIPT,
    )


def _picture(result: WordMap) -> str:
    """Return the points as SVG."""
    xs, ys = (
        [getattr(occurrence, axis) for occurrence in result.occurrences] for axis in ("x", "y")
    )

    def place(value: float, values: list[float], size: int) -> float:
        spread = max(values) - min(values)
        share = (value - min(values)) / spread if spread else 0.5
        return MARGIN + share * (size - 2 * MARGIN)

    lines = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="group" aria-label="Map of the word">']
    for i, occurrence in enumerate(result.occurrences):
        label = escape(f"{i + 1}: {occurrence.text} ({occurrence.place})", quote=True)
        x, y = place(occurrence.x, xs, WIDTH), HEIGHT - place(occurrence.y, ys, HEIGHT)
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" role="img" tabindex="{0 if i == 0 else -1}" '
            f'aria-label="{label}"/>'
        )
    return "\n".join([*lines, "</svg>"])
