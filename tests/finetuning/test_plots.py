"""The picture of a confusion matrix has literal names, no overlaps, and room for many labels."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from finetuning_problems import reviews, run, write_rows
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.mathtext import MathTextParser

from fastbert.finetuning.plots import plot_confusion
from fastbert.finetuning.task import Confusion
from fastbert.picture import fonts_for, literal

CHINESE = ["正面", "负面"]


@pytest.fixture(autouse=True)
def only_the_fonts_of_matplotlib(monkeypatch):
    """Hide the fonts that are installed on this machine, except those of matplotlib."""
    own = Path(font_manager.findfont("DejaVu Sans")).parent
    manager = font_manager.fontManager
    fonts = [entry for entry in manager.ttflist if own in Path(entry.fname).parents]
    monkeypatch.setattr(manager, "ttflist", fonts)
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda *_, **__: [])


@pytest.fixture
def figures(drawn, monkeypatch):
    """Return a list that collects each figure when it is saved."""
    plotted: list[Figure] = []
    write = Figure.savefig

    def savefig(figure, *arguments, **options):
        plotted.append(figure)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Glyph .* missing")
            return write(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return plotted


def matrix(labels: int) -> np.ndarray:
    """Return a confusion matrix in which 2i texts of label 2i have the prediction 2i + 1."""
    counts = np.diag(np.full(labels, 5))
    even = np.arange(0, labels - 1, 2)
    counts[even, even + 1] = even
    return counts


def drawn_names(figures: list[Figure], path: Path, names: list[str]) -> list[str]:
    plot_confusion({"test": Confusion(matrix(len(names)), names)}, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[-1].axes
    shown = [label.get_text() for label in axes.get_xticklabels()]
    assert shown == [label.get_text() for label in axes.get_yticklabels()]
    return shown


def square():
    """Return a rectangular glyph."""
    pen = TTGlyphPen(None)
    pen.moveTo((100, 0))
    for point in ((100, 700), (900, 700), (900, 0)):
        pen.lineTo(point)
    pen.closePath()
    return pen.glyph()


def font(path: Path, family: str, characters: str) -> Path:
    """Write a font in which each of `characters` is a rectangle, and return its path."""
    glyphs = {".notdef": TTGlyphPen(None).glyph()} | {f"u{ord(c):X}": square() for c in characters}
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(list(glyphs))
    builder.setupCharacterMap({ord(c): f"u{ord(c):X}" for c in characters})
    builder.setupGlyf(glyphs)
    builder.setupHorizontalMetrics(dict.fromkeys(glyphs, (1000, 100)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": family, "styleName": "Regular"})
    builder.setupOS2(sTypoAscender=800)
    builder.setupPost()
    builder.save(path)
    return path


@pytest.mark.parametrize(
    "names",
    [["$5 to $10", "$"], ["a_$x^2$", r"$\frac{"], [r"\$", r"\alpha & 50%"], ["a\nb", "c\t\x00"]],
)
def test_names_are_literal(figures, tmp_path, monkeypatch, names):
    monkeypatch.setattr(MathTextParser, "parse", lambda *_: pytest.fail("a name became a formula"))
    assert drawn_names(figures, tmp_path / "a.png", names) == [literal(name) for name in names]


@pytest.mark.each_value
@pytest.mark.parametrize("labels", [2, 3, 4, 30])
@pytest.mark.parametrize("length", [3, 12, 60])
def test_names_do_not_overlap(figures, tmp_path, labels, length):
    names = [f"{i:02d}{'m' * length}{i:02d}" for i in range(labels)]
    drawn_names(figures, tmp_path / "a.png", names)
    (figure,) = figures
    (axes,) = figure.axes
    # After this second drawing, the figure and its texts have the same number of pixels per inch.
    figure.draw_without_rendering()
    ticks = axes.get_xticklabels()
    boxes = [label.get_window_extent() for label in ticks]
    for first, second in pairwise(zip(ticks, boxes, strict=True)):
        (label, box), (_, following) = first, second
        if label.get_rotation():
            # The rotated labels are parallel lines of text, and `apart` is the distance between two
            # lines.
            apart = (following.x1 - box.x1) * math.sin(math.radians(label.get_rotation()))
            assert apart > label.get_fontsize() * figure.dpi / 72
        else:
            assert box.x1 < following.x0
    for box in boxes:
        assert box.x0 >= 0
        assert box.y0 >= 0


def test_long_names_that_become_equal_keep_their_numbers(figures, tmp_path):
    names = [f"{'a' * 30}{i}{'b' * 30}" for i in range(2)] + ["short"]
    short = f"{'a' * 16}…{'b' * 15}"
    shown = drawn_names(figures, tmp_path / "a.png", names)
    assert shown == [f"#0 {short}", f"#1 {short}", "short"]


def test_names_that_no_font_has_are_numbers_and_the_warning_names_them(figures, tmp_path):
    with pytest.warns(
        UserWarning, match=r"a\.png names these labels by their numbers.*#0 \(正面\)"
    ):
        shown = drawn_names(figures, tmp_path / "a.png", [CHINESE[0], "bad"])
    assert shown == ["#0", "bad"]
    assert "config.json has" in figures[0].get_suptitle()


def test_a_font_of_the_machine_draws_the_names(figures, tmp_path, monkeypatch):
    files = [
        str(font(tmp_path / f"{name}.ttf", name, characters))
        for name, characters in (("One", "正"), ("All", "正面负"))
    ]
    broken = tmp_path / "broken.ttf"
    broken.write_bytes(b"no font")
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(broken), *files])
    assert fonts_for(["good"]) == ([], set())
    assert fonts_for(CHINESE) == (["All"], set())
    assert fonts_for(["正\ue000"]) == (["All"], {"\ue000"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert drawn_names(figures, tmp_path / "a.png", CHINESE) == CHINESE


def test_many_labels_show_those_that_are_confused_most_often(figures, tmp_path):
    names = [f"label {i}" for i in range(3000)]
    shown = drawn_names(figures, tmp_path / "a.png", names)
    # 29 labels are shown: 14 pairs, and label 2970 of the next pair.
    assert shown == [*(f"label {i}" for i in (2970, *range(2972, 3000))), "2,971 others"]
    (axes,) = figures[0].axes
    assert axes.get_title() == "test: 29 of 3,000 labels, which are confused most often"
    counts = matrix(3000)
    texts = {tuple(map(int, text.get_position())): text.get_text() for text in axes.texts}
    assert texts[2, 1] == f"{counts[2972, 2973]:,}"
    assert texts[29, 0] == f"{counts[2970, 2971]:,}"
    told = sum(int(text.replace(",", "")) for text in texts.values())
    assert told == counts.sum()


def test_a_failure_to_draw_does_not_lose_the_run(classify, tmp_path, monkeypatch):
    data = write_rows(tmp_path / "train.csv", reviews(24, 0))

    def fail(*_, **__):
        raise RuntimeError("libfreetype\nis broken")

    monkeypatch.setattr(Figure, "savefig", fail)
    result, text = run(classify(data, epochs=1))
    for name in ("curves.png", "confusion.png"):
        assert f"{name} could not be drawn: RuntimeError: libfreetype is broken" in text
    assert result.confusion is None
    assert result.metrics.exists()
    assert (result.model / "model.safetensors").exists()
    assert result.figures["validation"]["accuracy"] >= 0


def test_a_run_with_a_dollar_in_a_label_ends_with_its_picture(drawn, classify, tmp_path):
    rows = [{**row, "label": f"${row['label']}$"} for row in reviews(24, 0)]
    result, text = run(classify(write_rows(tmp_path / "train.csv", rows), epochs=1))
    assert result.confusion.read_bytes().startswith(b"\x89PNG")
    assert "could not be drawn" not in text
