"""Reduction of documents to passages of text, without headings, lists, tables and markup.

Devlin et al. 2019 (section 3.1) take only the text passages of Wikipedia and leave out lists,
tables and headers. The rules here cover the marks of HTML, Markdown and wikis, and unmarked text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from fastbert.data.corpus import Document, split_paragraph
from fastbert.data.markup import without_markup
from fastbert.data.sentences import ends_sentence, has_mark, needs_no_mark

_RULE = re.compile(r"[\s=\-~*_+|:.#]*$")
_HEADING = re.compile(r"\s*(?:#{1,6}\s|={2,6}[^=].*={2,6}\s*$)")
_UNDERLINE = re.compile(r"\s{0,3}(?:={3,}|-{3,}|~{3,})\s*$")
_ITEM = re.compile(r"\s*(?:[-*+•‣◦▪·]|\(?\d{1,3}[.)]|\(?[a-z]\)|[*#:;]{2,})\s+\S")
_ROW = re.compile(r"\s*(?:[|!]|\{\|)")
_QUOTE = re.compile(r"\s*>+\s?")
# A line without a sentence-ending mark may be a heading if it has at most this many characters.
_SHORT = 50

Dropped = Counter[str]


def passages(text: str, dropped: Dropped) -> Document:
    r"""Return the sentences of the passages of a document.

    These parts are left out: markup, code blocks, headings, items of lists, rows of tables, and
    paragraphs without a sentence-ending mark. If most of a paragraph is in a script that needs no
    such marks, the paragraph is left out only if it is one line of at most 50 characters.

    Args:
        text: The document. Blank lines separate its paragraphs.
        dropped: Receives the number of lines that were left out, by reason: ``"headings"``,
            ``"list items"``, ``"table rows"`` and ``"fragments"``. Horizontal rules and the
            indented lines after the first line of a list item are not counted. `dropped` also
            receives the counts of `without_markup`.

    Returns:
        The sentences; an empty list if the document has no passage.

    Examples:
        >>> from collections import Counter
        >>> from fastbert.data.passages import passages
        >>> dropped = Counter()
        >>> passages("# Title\n\nIt rains. <b>We</b> stay in.\n\n- one\n- two\n", dropped)
        ['It rains.', 'We stay in.']
        >>> sorted(dropped.items())
        [('headings', 1), ('list items', 2), ('tags', 2)]
    """
    lines = without_markup(text, dropped).splitlines()
    sentences: Document = []
    for filled, block in groupby(lines, key=lambda line: bool(line.strip())):
        if not filled:
            continue
        remaining = list(_text_lines(list(block), dropped))
        if not remaining:
            continue
        short = len(remaining) == 1 and len(remaining[0]) <= _SHORT
        whole = any(map(has_mark, remaining)) or (not short and all(map(needs_no_mark, remaining)))
        if not whole:
            dropped["headings" if short else "fragments"] += len(remaining)
            continue
        sentences += split_paragraph(remaining)
    return sentences


def _text_lines(lines: list[str], dropped: Dropped) -> Iterator[str]:
    """Yield the lines of a block that are running text, and count the other lines."""
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
    """Return why a line is not running text, or None if the line is running text."""
    if _HEADING.match(line) or (following is not None and _UNDERLINE.match(following)):
        return "headings"
    if _ROW.match(line) or line.count("|") >= 2 or line.strip().count("\t") >= 2:
        return "table rows"
    if _ITEM.match(line):
        return "list items"
    return "headings" if _is_heading(line.strip(), following, before) else None


def _is_heading(line: str, following: str | None, before: str | None) -> bool:
    """Return whether a short line without a sentence-ending mark stands alone between sentences.

    A line of wrapped text, by contrast, is longer, or the next line continues the sentence in lower
    case.
    """
    if len(line) > _SHORT or line[-1] in ",;:-–—\"'”’)" or line[:1].islower():
        return False
    if ends_sentence(line):
        return False
    if before is not None and not ends_sentence(before.rstrip()):
        return False
    if following is None:
        return before is not None
    return not following.lstrip()[:1].islower()
