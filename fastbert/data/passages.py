"""Cleaning of documents to passages of text, without headings, lists, tables and markup.

Devlin et al. 2019 (section 3.1) take only the text passages of Wikipedia and leave out lists,
tables and headers. The rules here know the marks of HTML, Markdown and wikis, and plain text.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from fastbert.data.corpus import Document, split_paragraph


def _tags(name: str) -> tuple[str, re.Pattern[str], re.Pattern[str]]:
    opening = re.compile(rf"<{name}\b[^<>]{{0,300}}(?<!/)>", re.I)
    return "</", opening, re.compile(rf"</{name}\s{{0,9}}>", re.I)


# Blocks of several lines: a text that every such block has, its begin, its end, and its substitute.
_FENCE = re.compile(r"^```", re.M)
_BLOCKS = (
    ("<!--", re.compile("<!--"), re.compile("-->"), ""),
    *((*_tags(name), "") for name in ("ref", "math")),
    *((*_tags(name), "\n\n") for name in ("table", "script", "style", "pre", "gallery")),
    ("```", _FENCE, re.compile(r"^```[^\n]*$", re.M), ""),
    ("{|", re.compile(r"^\{\|", re.M), re.compile(r"^\|\}", re.M), ""),
)
# A template of a wiki contains others, so the innermost templates are removed first.
_TEMPLATE = re.compile(r"\{\{[^{}]{0,5000}\}\}")
_TEMPLATES_DEEP = 4
# A tag that ends a line, and tags that mark their line as a heading or as an item.
_BREAK = re.compile(r"</?(?:p|br|div|tr|td|th|ul|ol|dl|blockquote|section)\b[^<>]{0,300}>", re.I)
_HEADING_TAG = re.compile(r"<h[1-6]\b[^<>]{0,300}>", re.I)
_ITEM_TAG = re.compile(r"<(?:li|dt|dd)\b[^<>]{0,300}>", re.I)
_ITEM_END = re.compile(r"</(?:li|dt|dd|h[1-6])\s*>", re.I)
_TAG = re.compile(r"</?[A-Za-z][^<>]{0,300}>")
_INLINE: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("[[", re.compile(r"\[\[(?:File|Image|Category):[^\[\]]{0,2000}\]\]", re.I), ""),
    ("[[", re.compile(r"\[\[(?:[^\[\]|]{0,300}\|)?([^\[\]|]{0,300})\]\]"), r"\1"),
    ("](", re.compile(r"!\[[^\[\]]{0,500}\]\([^()\s]{0,500}\)"), ""),
    ("](", re.compile(r"\[([^\[\]]{0,500})\]\([^()\s]{0,500}\)"), r"\1"),
    ("[http", re.compile(r"\[https?://[^\s\[\]]{0,500} ?([^\[\]]{0,300})\]"), r"\1"),
    ("''", re.compile(r"'{2,5}"), ""),
    ("**", re.compile(r"\*\*(?=\S)|(?<=\S)\*\*"), ""),
    ("__", re.compile(r"\b__(?=\S)|(?<=\S)__\b"), ""),
    ("`", re.compile(r"`"), ""),
    # The number of a footnote, as in "in 1990.[12]".
    ("[", re.compile(r"(?<=\S)\[\d{1,3}\]"), ""),
)
_RULE = re.compile(r"[\s=\-~*_+|:.#]*$")
_HEADING = re.compile(r"\s*(?:#{1,6}\s|={2,6}[^=].*={2,6}\s*$)")
_UNDERLINE = re.compile(r"\s{0,3}(?:={3,}|-{3,}|~{3,})\s*$")
_ITEM = re.compile(r"\s*(?:[-*+•‣◦▪·]|\(?\d{1,3}[.)]|\(?[a-z]\)|[*#:;]{2,})\s+\S")
_ROW = re.compile(r"\s*(?:[|!]|\{\|)")
_QUOTE = re.compile(r"\s*>+\s?")
_MARKS = ".!?…。！？"
_SENTENCE_END = re.compile(rf"[{_MARKS}][\"'”’»)\]]*$")
_HAS_END = re.compile(f"[{_MARKS}]")
# A line without a mark at its end may be a heading if it is at most this long, in characters.
_SHORT = 50

Dropped = Counter[str]


def passages(text: str, dropped: Dropped) -> Document:
    r"""Return the sentences of the passages of a document.

    These parts are left out: markup, code blocks, headings, items of lists, rows of tables, and
    paragraphs without the mark of a sentence.

    Args:
        text: The document. Blank lines separate its paragraphs.
        dropped: Receives the number of lines that were left out, by reason: ``"headings"``,
            ``"list items"``, ``"table rows"`` and ``"fragments"``.

    Returns:
        The sentences, which are none if the document has no passage.

    Examples:
        >>> from collections import Counter
        >>> from fastbert.data.passages import passages
        >>> dropped = Counter()
        >>> passages("# Title\n\nIt rains. <b>We</b> stay in.\n\n- one\n- two\n", dropped)
        ['It rains.', 'We stay in.']
        >>> sorted(dropped.items())
        [('headings', 1), ('list items', 2)]
    """
    lines = _without_markup(text).splitlines()
    sentences: Document = []
    for filled, block in groupby(lines, key=lambda line: bool(line.strip())):
        if not filled:
            continue
        kept = list(_text_lines(list(block), dropped))
        if not kept:
            continue
        if not any(_HAS_END.search(line) for line in kept):
            dropped["headings" if len(kept) == 1 and len(kept[0]) <= _SHORT else "fragments"] += (
                len(kept)
            )
            continue
        sentences += split_paragraph(kept)
    return sentences


def _without_markup(text: str) -> str:
    """Remove blocks and tags, and resolve links; the lines of headings and items keep a mark."""
    for sign, begin, end, new in _BLOCKS:
        if sign in text:
            text = _without_blocks(text, begin, end, new)
    for _ in range(_TEMPLATES_DEEP):
        if "{{" not in text:
            break
        text = _TEMPLATE.sub("", text)
    if "<" in text:
        text = _HEADING_TAG.sub("\n# ", text)
        text = _ITEM_TAG.sub("\n- ", text)
        text = _ITEM_END.sub("\n", text)
        text = _BREAK.sub("\n", text)
        text = _TAG.sub("", text)
    for sign, pattern, new in _INLINE:
        if sign in text:
            text = pattern.sub(new, text)
    return html.unescape(text) if "&" in text else text


def _without_blocks(text: str, begin: re.Pattern[str], end: re.Pattern[str], new: str) -> str:
    """Replace each part from `begin` to the next `end`; a part without an end stays.

    If one part has no end, later parts have none either, so the time is linear.
    """
    parts, place = [], 0
    while (first := begin.search(text, place)) and (last := end.search(text, first.end())):
        parts += [text[place : first.start()], new]
        place = last.end()
    return "".join([*parts, text[place:]])


def _text_lines(lines: list[str], dropped: Dropped) -> Iterator[str]:
    """Yield the lines of a block that are running text, and count the others."""
    in_item = False
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else None
        line = _QUOTE.sub("", line, count=1) if line.lstrip().startswith(">") else line
        if in_item and line[:1].isspace():
            continue
        in_item = False
        if _RULE.match(line):
            continue
        if reason := _reason(line, following, lines[number - 1] if number else None):
            in_item = reason == "list items"
            dropped[reason] += 1
        else:
            yield line


def _reason(line: str, following: str | None, before: str | None) -> str | None:
    """Return why a line is not running text, or None if it is."""
    if _HEADING.match(line) or (following is not None and _UNDERLINE.match(following)):
        return "headings"
    if _ROW.match(line) or line.count("|") >= 2 or line.strip().count("\t") >= 2:
        return "table rows"
    if _ITEM.match(line):
        return "list items"
    return "headings" if _is_heading(line.strip(), following, before) else None


def _is_heading(line: str, following: str | None, before: str | None) -> bool:
    """Return whether a line without a mark at its end stands alone between sentences.

    A line of wrapped text is longer, or the next line continues its sentence without a capital.
    """
    if len(line) > _SHORT or line[-1] in ".!?…。！？,;:-–—\"'”’)" or line[:1].islower():
        return False
    if before is not None and not _SENTENCE_END.search(before.rstrip()):
        return False
    if following is None:
        return before is not None
    return not following.lstrip()[:1].islower()
