"""Sentence splitting by rule: a sentence ends at a full stop, question or exclamation mark.

Space and a capital letter must follow the mark. The rules cover the exceptions of English prose:
titles and abbreviations (Mr., e.g.), initials (J. R. Smith), decimals and versions (2.5), numbered
headings (3. Scope) and closing quotes.
"""

from __future__ import annotations

import re

# This matches a mark that may end a sentence, with the closing quotes and brackets after it. A run
# of marks is matched only from its first mark, so that the time stays linear.
_END = re.compile(r"""(?:(?<![.!?…])[.!?…]+["'”’»)\]]*(?=\s)|[。！？]+[”’」』）]*)\s*""")
_OPENERS = "\"'“‘«([{*-–—"
# Abbreviations are in lower case and without the final stop. Abbreviations that often end a
# sentence (etc., inc.) are absent, so the capital letter after them decides.
_ABBREVIATION = re.compile(
    r"mr|mrs|ms|dr|prof|rev|hon|st|sr|jr|gen|col|capt|lt|sgt|gov|sen|rep|pres|vs|e\.g|i\.e|cf|viz|al|"
    r"ca|approx|no|nos|vol|vols|fig|figs|eq|sec|ch|pp|ed|eds|"
    r"jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec"
)


def _is_boundary(text: str, start: int, match: re.Match[str], needs_capital: bool) -> bool:
    """Return whether the mark of `match`, before more text, ends the sentence from `start`.

    Only the words around the mark are read, so that the time does not depend on the sentence.
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
    """Split one paragraph into sentences, in order, with single spaces between words.

    A sentence has at least one letter or digit, so rules and underlines are dropped. A text without
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
