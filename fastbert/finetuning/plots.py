"""The confusion matrix of a model as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fastbert.atomic_file import write_atomically
from fastbert.finetuning.task import Confusion

# With more labels, the numbers would overlap.
MOST_NUMBERS = 20


def plot_confusion(matrices: Mapping[str, Confusion], path: Path) -> None:
    """Draw the confusion matrix of each part, with the share of each row as the colour.

    Args:
        matrices: The matrices by the name of the part, at least one.
        path: The PNG file, which appears complete or not at all.

    Raises:
        OSError: If the file cannot be written.
    """
    # The object interface with Agg needs no display and does not change pyplot's global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = len(next(iter(matrices.values())).names)
    side = min(14.0, 3.0 + 0.5 * labels)
    figure = Figure(figsize=(side * len(matrices), side), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    for axes, (part, (matrix, names)) in zip(panels, matrices.items(), strict=True):
        shares = matrix / matrix.sum(1, keepdims=True).clip(min=1)
        axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
        axes.set(title=part, xlabel="predicted", ylabel="expected")
        axes.set_xticks(range(labels), names, rotation=90 if labels > 4 else 0)
        axes.set_yticks(range(labels), names)
        if labels <= MOST_NUMBERS:
            for row in range(labels):
                for column in range(labels):
                    colour = "white" if shares[row, column] > 0.5 else "black"
                    number = f"{matrix[row, column]:,}"
                    axes.text(column, row, number, ha="center", va="center", color=colour)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=120))
