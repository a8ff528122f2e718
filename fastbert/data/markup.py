"""Removal of HTML, Markdown and wiki markup from a text, with its tables, code and comments.

A string in the form of a tag is markup only if HTML or MediaWiki define an element of its name.
Each attribute must also have a value, or be a boolean attribute of HTML. Therefore
``p<q was used, and r>s`` and ``List<String>`` stay text.
"""

from __future__ import annotations

import functools
import html
import re
from collections import Counter
from html.parser import HTMLParser

# `without_markup` counts the removed tags under the first name, and the removed parts, such as
# comments, tables, code and templates, under the second name.
MARKUP = TAGS, PARTS = "tags", "parts of markup"
# These are the elements of HTML, including obsolete elements, the elements of MathML and SVG that
# occur in prose, and the extension tags of MediaWiki.
_NAMES = """
a abbr acronym address applet area article aside audio b base basefont bdi bdo bgsound big blink
blockquote body br button canvas caption center cite code col colgroup data datalist dd del details
dfn dialog dir div dl dt em embed fieldset figcaption figure font footer form frame frameset h1 h2
h3 h4 h5 h6 head header hgroup hr html i iframe img input ins kbd label legend li link main map mark
marquee menu meta meter nav nobr noframes noscript object ol optgroup option output p param picture
pre progress q rb rp rt rtc ruby s samp script search section select slot small source span strike
strong style sub summary sup svg table tbody td template textarea tfoot th thead time title tr track
tt u ul var video wbr
path g circle rect math mi mn mo mrow msub msup mfrac mtext
categorytree ce charinsert chem gallery graph hiero imagemap includeonly indicator inputbox
languages mapframe maplink noinclude nowiki onlyinclude poem ref references score syntaxhighlight
templatedata templatestyles timeline translate
"""
_ELEMENTS = frozenset(_NAMES.split())
# These are the boolean attributes of HTML, which need no value.
_FLAGS = """
allowfullscreen async autofocus autoplay checked compact controls declare default defer disabled
formnovalidate hidden inert inline ismap itemscope loop multiple muted nohref nomodule noresize
noshade novalidate nowrap open playsinline readonly required reversed selected
"""
_BOOLEAN = frozenset(_FLAGS.split())
_BREAKS = {"p", "br", "div", "tr", "td", "th", "ul", "ol", "dl", "blockquote", "section"}
_HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
_ITEMS = {"li", "dt", "dd"}
# This pattern matches a tag. The value of an attribute in double quotation marks may contain ">".
_TAG = re.compile(r"""</?[A-Za-z](?:[^<>"]|"[^"<]{0,300}"){0,300}>""")
_FENCE = re.compile(r"^```", re.M)


def _tags(name: str) -> tuple[str, re.Pattern[str], re.Pattern[str]]:
    opening = re.compile(rf"<{name}\b[^<>]{{0,300}}(?<!/)>", re.I)
    return "</", opening, re.compile(rf"</{name}\s{{0,9}}>", re.I)


# Each row describes one kind of part, such as a comment or a table. The row has a text that every
# such part contains, the patterns of the part's begin and end, and the text that replaces the part.
# A part may have several lines.
_PARTS = (
    ("<!--", re.compile("<!--"), re.compile("-->"), ""),
    *((*_tags(name), "") for name in ("ref", "math")),
    *((*_tags(name), "\n\n") for name in ("table", "script", "style", "pre", "gallery")),
    ("```", _FENCE, re.compile(r"^```[^\n]*$", re.M), ""),
    ("{|", re.compile(r"^\{\|", re.M), re.compile(r"^\|\}", re.M), ""),
)
# A template of a wiki may contain templates, so the innermost templates are removed first. Each of
# the `_TEMPLATES_DEEP` passes removes one level.
_TEMPLATE = re.compile(r"\{\{[^{}]{0,5000}\}\}")
_TEMPLATES_DEEP = 4
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
    # This row matches the number of a footnote, as in "in 1990.[12]".
    ("[", re.compile(r"(?<=\S)\[\d{1,3}\]"), ""),
)


def without_markup(text: str, dropped: Counter[str]) -> str:
    """Remove tags and parts such as tables and code, and resolve links and character references.

    Args:
        text: The text.
        dropped: Receives the number of removed tags as ``"tags"``, and the number of removed parts
            as ``"parts of markup"``.

    Returns:
        The text. The headings and list items of HTML become lines that begin with ``#`` and ``-``.
    """
    for sign, begin, end, new in _PARTS:
        if sign in text:
            text = _without_parts(text, begin, end, new, dropped)
    for _ in range(_TEMPLATES_DEEP):
        if "{{" not in text:
            break
        text, count = _TEMPLATE.subn("", text)
        dropped[PARTS] += count
    if "<" in text:
        text = _without_tags(text, dropped)
    for sign, pattern, new in _INLINE:
        if sign in text:
            text = pattern.sub(new, text)
    return html.unescape(text) if "&" in text else text


def _without_parts(
    text: str, begin: re.Pattern[str], end: re.Pattern[str], new: str, dropped: Counter[str]
) -> str:
    """Replace each part, from a match of `begin` to the next match of `end`, by `new`.

    A part stays if it has no end, or if its begin has the form of a tag but is not a tag of HTML or
    MediaWiki. After a part without an end, no later part has an end. The search then stops, so that
    the whole search takes linear time.
    """
    parts, place = [], 0
    while (first := begin.search(text, place)) and (last := end.search(text, first.end())):
        if first[0][1:2].isalpha() and _substitute(first[0]) is None:
            parts.append(text[place : first.end()])
            place = first.end()
            continue
        parts += [text[place : first.start()], new]
        place = last.end()
        dropped[PARTS] += 1
    return "".join([*parts, text[place:]])


def _without_tags(text: str, dropped: Counter[str]) -> str:
    def replace(match: re.Match[str]) -> str:
        new = _substitute(match[0])
        if new is None:
            return match[0]
        dropped[TAGS] += 1
        return new

    return _TAG.sub(replace, text)


# A few different tags make up most tags of a corpus, so the results are cached.
@functools.lru_cache(maxsize=1 << 14)
def _substitute(text: str) -> str | None:
    """Return the substitute for a tag, or None if the text is not a tag of HTML or MediaWiki."""
    tag = _Tag(text)
    if tag.name is None:
        return None
    if tag.name in _HEADINGS:
        return "\n" if tag.closes else "\n# "
    if tag.name in _ITEMS:
        return "\n" if tag.closes else "\n- "
    return "\n" if tag.name in _BREAKS else ""


class _Tag(HTMLParser):
    """A parser of one string in the form of a tag.

    Attributes:
        name: Name of the element; None if HTML and MediaWiki do not define the element, or if an
            attribute without a value is not a boolean attribute.
        closes: Whether the tag is an end tag.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=False)
        self.name: str | None = None
        self.closes = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _ELEMENTS and all(value is not None or name in _BOOLEAN for name, value in attrs):
            self.name = tag

    def handle_endtag(self, tag: str) -> None:
        self.closes = True
        self.name = tag if tag in _ELEMENTS else None
