"""The parts that the HTML pages of the analyses share: frame, tables and heat maps.

A page is one file that loads no other file, and its content security policy forbids requests. All
text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from fastbert.atomic_file import write_atomically

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1b1b1f; --line: #c9c9d1;
  --plus: 217 119 6; --minus: 37 99 235; }
@media (prefers-color-scheme: dark) { :root { --ground: #16161a; --ink: #ececf1; --line: #45454f;
  --plus: 245 158 11; --minus: 96 165 250; } }
body { background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.heat { line-height: 2.2; overflow-wrap: anywhere; }
.heat span { padding: .15em .25em; border-radius: .25em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .3em 0; }
.scroll { margin-bottom: 1rem; }
th, td { border-bottom: 1px solid var(--line); padding: .25em .7em; text-align: left; }
.number { text-align: right; }
svg { border: 1px solid var(--line); width: 100%; height: auto; }
circle { fill: rgb(var(--minus)); stroke: var(--ground); }
circle:hover, circle:focus { fill: rgb(var(--plus)); outline: none; stroke: var(--ink); }
output { display: block; min-height: 3.2em; padding: .5em 0; }
"""
# Opacity of the background of the word with the largest absolute value in a heat map. The opacity
# is below 1, so that the text stays readable.
_DARKEST = 0.6


def document(title: str, body: Iterable[str], script: str = "") -> str:
    """Return a complete HTML page with the style and the content security policy of all pages.

    Args:
        title: The title, as plain text.
        body: The parts of the body, as HTML.
        script: The script of the page, or an empty string.

    Returns:
        The HTML text.
    """
    scripts = "; script-src 'unsafe-inline'" if script else ""
    policy = f"default-src 'none'; style-src 'unsafe-inline'{scripts}"
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        '<head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style></head>",
        f"<body><main><h1>{escape(title)}</h1>",
        *body,
        "</main>",
        f"<script>{script}</script>" if script else "",
        "</body></html>",
    ]
    return "\n".join(lines) + "\n"


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as HTML; the first column has the headings of the rows.

    Args:
        caption: The caption, as plain text.
        header: The headings of the columns, as plain text.
        rows: The cells of each row, as plain text.

    Returns:
        The HTML text.
    """
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    lines = [
        '<div class="scroll" tabindex="0" role="region" aria-label="' + escape(caption) + '">',
        f"<table><caption>{escape(caption)}</caption>",
        f"<thead><tr>{head}</tr></thead><tbody>",
    ]
    for first, *others in rows:
        cells = "".join(_cell(cell) for cell in others)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    return "\n".join([*lines, "</tbody></table></div>"])


def _cell(text: str) -> str:
    """Return a cell of a table; numbers are aligned at the right."""
    is_number = text.removeprefix("-").replace(".", "", 1).isdigit()
    kind = ' class="number"' if is_number else ""
    return f"<td{kind}>{escape(text)}</td>"


def heat(words: Sequence[str], values: Sequence[float], second: int | None = None) -> str:
    """Return the words as HTML; a deeper background means a larger absolute value.

    Args:
        words: N words, as plain text.
        values: N values. Positive and negative values have different colours.
        second: Index of the word that begins a second line; None means one line.

    Returns:
        The HTML text. The numbers are only in the titles of the words, so a page also needs a
        table.
    """
    largest = max((abs(v) for v in values if math.isfinite(v)), default=0.0)
    spans = []
    for word, value in zip(words, values, strict=True):
        share = abs(value) / largest if largest and math.isfinite(value) else 0.0
        colour = "--plus" if value >= 0 else "--minus"
        style = f"background: rgb(var({colour}) / {_DARKEST * share:.3f})"
        spans.append(f'<span style="{style}" title="{value:.4g}">{escape(word)}</span>')
    lines = [spans] if second is None else [spans[:second], spans[second:]]
    return "".join(f'<p class="heat">{" ".join(line)}</p>' for line in lines)


def check_output(output: Path) -> None:
    """Check that a path may be the path of a page.

    Args:
        output: The path of the page.

    Raises:
        ValueError: If the suffix is not .html, or if the path is a folder.
    """
    if output.suffix.lower() != ".html":
        raise ValueError(f"output: got {str(output)!r}, allowed: a .html file")
    if output.is_dir():
        raise ValueError(f"output: {output} is a folder, allowed: a .html file")


def write(output: Path, text: str) -> None:
    """Write a page; the file appears complete or not at all."""
    write_atomically(output, lambda temporary: temporary.write_text(text, encoding="utf-8"))
