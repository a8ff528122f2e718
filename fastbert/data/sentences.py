"""Sentence splitting by rule: a full stop, question or exclamation mark, then space and a capital.

The rules cover what running English text needs: titles and abbreviations (Mr., e.g.), initials
(J. R. Smith), decimals and versions (2.5), numbered headings (3. Scope) and closing quotes.
"""

from __future__ import annotations

import re

# A mark that may end a sentence, with the quotes and brackets that close after it. A run of marks
# is tried from its first only, so that the time stays linear.
_END = re.compile(r"""(?:(?<![.!?…])[.!?…]+["'”’»)\]]*(?=\s)|[。！？]+[”’」』）]*)\s*""")
_OPENERS = "\"'“‘«([{*-–—"
# Lower case and without the final stop. Those that often end a sentence (etc., inc.) are left out:
# what follows them decides by its capital.
_ABBREVIATION = re.compile(
    r"mr|mrs|ms|dr|prof|rev|hon|st|sr|jr|gen|col|capt|lt|sgt|gov|sen|rep|pres|vs|e\.g|i\.e|cf|viz|al|"
    r"ca|approx|no|nos|vol|vols|fig|figs|eq|sec|ch|pp|ed|eds|"
    r"jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec"
)


def _is_boundary(text: str, start: int, match: re.Match[str], needs_capital: bool) -> bool:
    """Whether the sentence from ``start`` ends with the mark of ``match``, which more text follows.

    Looks at the words around the mark only, however long the sentence is.
    """
    mark, end, resume = match.group().strip(), match.start(), match.end()
    if mark[0] in "。！？":
        return True
    while text[resume : resume + 1] and text[resume] in _OPENERS:
        resume += 1
    if needs_capital and text[resume : resume + 1].islower():
        return False
    if not mark.startswith(".") or mark.startswith(".."):
        return True
    stop = end - (end > start and text[end - 1] == " ")
    first = max(start, text.rfind(" ", start, stop) + 1)
    word = text[first:stop].lstrip(_OPENERS).lower()
    is_initial = len(word) == 1 and word.isalpha() and word != "i"
    is_whole = end - start == len(word) and text[start:end] == word
    is_heading_number = is_whole and re.fullmatch(r"[\dA-Za-z]?[\d.]*", word) is not None
    return not (_ABBREVIATION.fullmatch(word) or is_initial or is_heading_number)


def split_sentences(text: str) -> list[str]:
    """The sentences of one paragraph, in order, white space folded to single spaces.

    A sentence holds at least one letter or digit, so rules and underlines disappear. Text without
    any capital letter (a lower-cased corpus) is split at every mark.
    """
    text = " ".join(text.split())
    needs_capital = text != text.lower()
    sentences, start = [], 0
    for match in _END.finditer(text):
        resume = match.end()
        if resume < len(text) and _is_boundary(text, start, match, needs_capital):
            sentences.append(text[start:resume].rstrip())
            start = resume
    sentences.append(text[start:])
    return [sentence for sentence in sentences if any(c.isalnum() for c in sentence)]
