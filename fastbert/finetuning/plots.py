"""The confusion matrix of a model as a picture."""

from __future__ import annotations

import textwrap
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastbert.finetuning.task import Confusion
from fastbert.picture import fonts_for, literal, picture, width_of

# Largest number of rows of a matrix. With more rows, the numbers and the names would be too small
# to be read, so the labels that are confused least often share the last row.
MOST_ROWS = 30
# Largest number of characters of a name; the middle of a longer name is left out.
LONGEST_NAME = 32
# Sizes in inches: the smallest cell, the smallest side of a matrix, and the largest side to which a
# matrix is enlarged so that horizontal names fit below it.
CELL, SMALLEST, LARGEST = 0.45, 2.5, 6.0


def plot_confusion(matrices: Mapping[str, Confusion], path: Path) -> None:
    """Draw the confusion matrix of each part; the colour of a cell is its share of the row.

    With more than 30 labels, the matrix has the 29 labels that are confused most often, and a row
    and a column for all others together. Names are drawn literally, and the middle of a long name
    is left out. If no font of the machine has the characters of a name, the number of the label in
    ``config.json`` replaces the name, and a warning names the labels.

    Args:
        matrices: At least one matrix, by the name of its part. All matrices have the same labels.
        path: The PNG file, which appears complete or not at all.

    Raises:
        OSError: If the file cannot be written.
    """
    names = next(iter(matrices.values())).names
    counts = {part: matrix for part, (matrix, _) in matrices.items()}
    chosen = _most_confused(list(counts.values()))
    fonts, missing = fonts_for(names[i] for i in chosen)
    shown = _shown([names[i] for i in chosen], chosen, missing)
    undrawn = [i for i in chosen if missing & set(names[i])]
    left_out = len(names) - len(chosen)
    if left_out:
        shown.append(f"{left_out:,} others")
    if undrawn:
        told = ", ".join(f"#{i} ({names[i]})" for i in undrawn)
        warnings.warn(
            f"{path.name} names these labels by their numbers, because no font of this machine "
            f"has all of their characters: {told:.1000}; a font such as Noto Sans may have them",
            stacklevel=2,
        )
    widest = max(width_of(name, fonts) for name in shown)
    side, horizontal = _side(len(shown), widest)
    width = (side + widest + 0.8) * len(counts)
    height = side + 1.0 + (0.0 if horizontal else 0.7 * widest)
    with picture(path, width, height, fonts=fonts) as figure:
        panels = figure.subplots(1, len(counts), squeeze=False)[0]
        for axes, (part, matrix) in zip(panels, counts.items(), strict=True):
            title = part
            if left_out:
                title += f": {len(chosen)} of {len(names):,} labels, which are confused most often"
            axes.set_title(title, fontsize=11)
            _draw(axes, _merged(matrix, chosen), shown, left_out=bool(left_out))
            turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
            axes.set_xticks(range(len(shown)), shown, **({} if horizontal else turned))
        if undrawn:
            note = "No font of this machine has the names of the labels with a #. config.json has "
            note += "the names by these numbers."
            wrapped = textwrap.fill(note, max(20, int(12 * width)))
            figure.suptitle(wrapped, fontsize=9, color="dimgray")


def _most_confused(matrices: Sequence[NDArray[np.int64]]) -> list[int]:
    """Return the sorted indices of the shown labels: all, or the labels most often confused."""
    total = np.sum(matrices, axis=0)
    labels = len(total)
    if labels <= MOST_ROWS:
        return list(range(labels))
    mistakes = np.triu(total + total.T, k=1)
    first, second = np.nonzero(mistakes)
    order = np.argsort(-mistakes[first, second], kind="stable")
    pairs = np.stack([first, second], axis=1)[order]
    # If too few labels are confused, the most frequent labels fill the matrix.
    frequent = np.argsort(-total.sum(1), kind="stable")
    ranked = dict.fromkeys([*pairs.ravel().tolist(), *frequent.tolist()])
    return sorted(list(ranked)[: MOST_ROWS - 1])


def _merged(matrix: NDArray[np.int64], chosen: Sequence[int]) -> NDArray[np.int64]:
    """Return the counts of the chosen labels, with all other labels merged into a last label."""
    if len(chosen) == len(matrix):
        return matrix
    group = np.full(len(matrix), len(chosen))
    group[chosen] = np.arange(len(chosen))
    rows = np.zeros((len(chosen) + 1, len(matrix)), dtype=np.int64)
    np.add.at(rows, group, matrix)
    merged = np.zeros((len(chosen) + 1, len(chosen) + 1), dtype=np.int64)
    np.add.at(merged.T, group, rows.T)
    return merged


def _shown(names: Sequence[str], numbers: Sequence[int], missing: set[str]) -> list[str]:
    """Return the text for each label: its name, its number, or both if shortened names agree."""
    short = [name if len(name) <= LONGEST_NAME else _shortened(name) for name in names]
    uses = Counter(short)
    shown = []
    for name, text, number in zip(names, short, numbers, strict=True):
        if missing & set(name):
            shown.append(f"#{number}")
        else:
            shown.append(literal(text if uses[text] == 1 else f"#{number} {text}"))
    return shown


def _shortened(name: str) -> str:
    half = LONGEST_NAME // 2
    return f"{name[:half]}…{name[1 - half :]}"


def _side(labels: int, widest: float) -> tuple[float, bool]:
    """Return the side of a matrix in inches, and whether names below it fit side by side."""
    side, needed = max(SMALLEST, CELL * labels), labels * (widest + 0.15)
    horizontal = needed <= max(side, LARGEST)
    return (max(side, needed) if horizontal else side), horizontal


def _draw(axes: Any, matrix: NDArray[np.int64], names: list[str], *, left_out: bool) -> None:
    """Draw a matrix; with `left_out`, the cell in the last row and column is grey."""
    from matplotlib import colormaps

    shares = np.ma.array(matrix / matrix.sum(1, keepdims=True).clip(min=1))
    if left_out:
        shares[-1, -1] = np.ma.masked
    blues = colormaps["Blues"].with_extremes(bad="0.9")
    axes.imshow(shares, cmap=blues, vmin=0.0, vmax=1.0)
    axes.set(xlabel="predicted", ylabel="expected")
    axes.set_yticks(range(len(names)), names)
    dark = shares.filled(0.0) > 0.5
    for row, column in np.argwhere(matrix > 0 if len(names) > 10 else matrix >= 0).tolist():
        number = f"{matrix[row, column]:,}"
        size = min(10.0, 0.8 * 72 * CELL / (0.6 * max(3, len(number))))
        axes.text(
            *(column, row, number),
            ha="center",
            va="center",
            fontsize=size,
            color="white" if dark[row, column] else "black",
            # The layout does not need to measure these texts, which are inside the axes.
            in_layout=False,
        )
