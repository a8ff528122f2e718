"""Sentence splitting by rule: a sentence ends at a mark that ends sentences in its script.

The marks of all scripts are those of the property Sentence_Break of Unicode (UAX #29), from the
package regex. A full stop, a question mark or an exclamation mark ends a sentence only before a
space and a character other than a lower-case letter. The rules cover the exceptions of English
prose: titles and abbreviations (Mr., e.g.), initials (J. R. Smith), decimals and versions (2.5),
numbered headings (3. Scope) and closing quotes. In Thai and Lao, which have no such marks, a blank
ends a sentence.
"""

from __future__ import annotations

import re

import regex

# These marks end a sentence only before a space and a character other than a lower-case letter. The
# Arabic full stop is among these marks because it also stands inside of abbreviations.
_WEAK = ".!?…\u06d4"
# These marks always end a sentence. They include the marks of Tibetan, which Unicode leaves out
# because these marks also end phrases.
_STRONG = rf"[[\p{{SB=STerm}}\p{{SB=ATerm}}\u0f0d-\u0f12]--[{_WEAK}\u2024\uff0e\ufe52]]"
# This pattern matches a Greek question mark, which has the form of a semicolon, after a Greek word.
_GREEK = r"(?<=\p{Greek})[;\u037e](?=\s+\p{Lu})"
# This pattern matches a blank between letters of Thai or Lao, which have no sentence-ending marks.
_BLANK = regex.compile(r"(?<=[\p{Thai}\p{Lao}]) (?=[\p{Thai}\p{Lao}])")
_CLOSERS = r"""["'”’»)\]」』）]*"""
# This pattern matches a mark that may end a sentence, and the closing quotes and brackets after the
# mark. A run of marks is matched only from its first mark, so that the time stays linear. The
# lookahead at the start of the pattern halves the time.
_END = regex.compile(
    rf"(?=[[\p{{SB=STerm}}\p{{SB=ATerm}}\u0f0d-\u0f12{_WEAK};\u037e]])"
    rf"(?:(?<![{_WEAK}])[{_WEAK}]+{_CLOSERS}(?=\s)|{_STRONG}+{_CLOSERS}|{_GREEK})\s*",
    regex.VERSION1,
)
_MARK = regex.compile(rf"[{_WEAK}]|{_STRONG}|{_GREEK}", regex.VERSION1)
# Words in these scripts are not divided by blanks, and many of their texts have no sentence-ending
# marks.
_UNMARKED = regex.compile(r"[\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]")
_OPENERS = "\"'“‘«([{*-–—"
# Abbreviations are in lower case and without the final stop. Abbreviations that often end a
# sentence (etc., inc.) are absent; the case of the letter after such an abbreviation decides.
_ABBREVIATION = re.compile(
    r"mr|mrs|ms|dr|prof|rev|hon|st|sr|jr|gen|col|capt|lt|sgt|gov|sen|rep|pres|vs|e\.g|i\.e|cf|viz|al|"
    r"ca|approx|no|nos|vol|vols|fig|figs|eq|sec|ch|pp|ed|eds|"
    r"jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec"
)


def has_mark(text: str) -> bool:
    """Return whether a text has a mark that may end a sentence."""
    return _MARK.search(text) is not None


def needs_no_mark(text: str) -> bool:
    """Return whether most of a text is in a script in which sentences may have no mark."""
    return 2 * len(_UNMARKED.findall(text)) > len(text)


def ends_sentence(text: str) -> bool:
    """Return whether a text, without its closing quotes, ends with a sentence-ending mark."""
    return _MARK.match(text.rstrip("\"'”’»)]」』）")[-1:]) is not None


def _is_boundary(text: str, start: int, match: regex.Match[str], needs_capital: bool) -> bool:
    """Return whether the mark of `match` ends the sentence that begins at `start`.

    The caller has checked that more text follows the mark. With `needs_capital`, a full stop, a
    question mark or an exclamation mark before a lower-case letter is no end. Only the words around
    the mark are read, so the time does not depend on the length of the sentence.
    """
    mark, end, resume = match.group().strip(), match.start(), match.end()
    if mark[0] not in _WEAK:
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

    A sentence has at least one letter or digit, so horizontal rules and underlines are dropped. In
    a text without any capital letter (a lower-cased corpus), a sentence may begin in lower case.
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
    if not text.isascii():
        sentences = [part for sentence in sentences for part in _BLANK.split(sentence)]
    return [sentence for sentence in sentences if any(c.isalnum() for c in sentence)]
