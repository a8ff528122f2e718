"""Pictures by matplotlib, with literal text and fonts for characters the default font lacks."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.atomic_file import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontEntry

WEIGHT = 400


@contextmanager
def picture(
    path: Path, width: float, height: float, *, dpi: int = 120, fonts: Sequence[str] = ()
) -> Iterator[Figure]:
    """Yield an empty figure, which is written to a file if the block ends without an error.

    Args:
        path: The file to write, whose suffix selects the format, such as PNG, SVG or PDF. The file
            appears complete or not at all.
        width: Width in inches.
        height: Height in inches.
        dpi: Pixels per inch.
        fonts: Font families from `fonts_for`, for the characters that the default font lacks.

    Yields:
        The figure, with a constrained layout.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    from matplotlib import rc_context

    # The object interface with Agg needs no display and does not change pyplot's global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # TeX would read the text of the user as commands, and may not be installed.
    settings: Any = {"text.usetex": False, "font.family": _families(fonts)}
    with rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=dpi))


def literal(text: str) -> str:
    r"""Escape a text for matplotlib, so that each character is drawn literally.

    Dollar signs, which would begin a formula, and control characters are escaped. Format
    characters, such as direction marks and joiners, are removed. Every separator becomes a space.

    Args:
        text: Any text.

    Returns:
        The text on one line.

    Examples:
        >>> from fastbert.picture import literal
        >>> print(literal("$5\t$x_1$"))
        \$5\t\$x_1\$
    """
    return _visible(text).replace("$", r"\$")


def fonts_for(texts: Iterable[str]) -> tuple[list[str], set[str]]:
    """Find fonts of this machine for the characters that matplotlib's default font lacks.

    Args:
        texts: The texts.

    Returns:
        The font families that are needed in addition to the default font, and the characters that
        no font has. matplotlib draws each character that no font has as an empty box.
    """
    from matplotlib import font_manager

    default = font_manager.findfont(font_manager.FontProperties())
    missing = set("".join(map(_visible, texts)))
    missing -= _drawn_by(default, missing)
    families: list[str] = []
    if not missing:
        return families, missing
    entries = _installed()
    while missing:
        drawn = {entry: _drawn_by(entry.fname, missing) for entry in entries}
        best = max(entries, key=lambda entry: len(drawn[entry]), default=None)
        if best is None or not drawn[best]:
            break
        families.append(best.name)
        missing -= drawn[best]
    return families, missing


def width_of(text: str, fonts: Sequence[str], size: float = 10.0) -> float:
    """Return the width of a text in a picture, in inches.

    Args:
        text: A text from `literal`.
        fonts: Font families from `fonts_for`.
        size: Size of the font in points.
    """
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    properties = FontProperties(family=_families(fonts))
    extents = TextPath((0, 0), text, size=size, prop=properties, usetex=False).get_extents()
    return float(extents.width) / 72 if text.strip() else 0.0


def _families(fonts: Sequence[str]) -> list[str]:
    from matplotlib import rcParams

    return [*rcParams["font.family"], *fonts]


def _visible(text: str) -> str:
    """Return a text on one line, without format characters and with escaped control characters."""
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    kind = unicodedata.category(character)
    if kind == "Cf":
        return ""
    if kind == "Cc":
        return character.encode("unicode_escape").decode()
    return " " if kind.startswith("Z") else character


def _installed() -> list[FontEntry]:
    """Return the fonts of this machine, with upright fonts of regular weight first."""
    from matplotlib import font_manager, get_data_path

    manager = font_manager.fontManager
    # matplotlib caches its list of fonts, so the list lacks fonts that were installed later.
    known = {Path(entry.fname) for entry in manager.ttflist}
    for path in font_manager.findSystemFonts():
        if Path(path) not in known:
            try:
                manager.addfont(path)
            except (OSError, RuntimeError, ValueError):
                continue  # The file is not a font that matplotlib can read.
    # The fonts that matplotlib ships are left out, because one of them has a box for every
    # character.
    own = Path(get_data_path())
    entries = [entry for entry in manager.ttflist if own not in Path(entry.fname).parents]
    return sorted(
        entries,
        key=lambda entry: (
            entry.style != "normal",
            abs(int(entry.weight) - WEIGHT),
            entry.name,
            entry.fname,
        ),
    )


def _drawn_by(path: str, characters: Iterable[str]) -> set[str]:
    """Return the subset of `characters` that a font can draw."""
    from matplotlib.ft2font import FT2Font

    try:
        font = FT2Font(path)
        # This call fails for a font of coloured bitmaps, which has no outlines.
        font.set_size(10, 72)
    except (OSError, RuntimeError, ValueError):
        return set()
    return {character for character in characters if _draws(font, character)}


def _draws(font: Any, character: str) -> bool:
    if not font.get_char_index(ord(character)):
        return False
    try:
        glyph = font.load_char(ord(character))
    except (OSError, RuntimeError, ValueError):
        return False
    # Some fonts have an empty glyph for every character.
    return character == " " or glyph.width > 0
