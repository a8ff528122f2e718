"""Splitting of sentences into words, as in data sets that have a tag for each word."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

# Chinese and Japanese have no blanks between words, so each of their characters and marks is a
# word.
_ALONE = re.compile(
    "[\u3000-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef"
    "\U00020000-\U0003ffff]"
)


class Word(NamedTuple):
    """A word of a sentence.

    Attributes:
        text: The word.
        start: Index of the first character of the word in the sentence.
    """

    text: str
    start: int


def split_words(sentence: str) -> list[Word]:
    """Divide a sentence into words.

    Words are separated by white space. A mark at the start or the end of a word is a word of its
    own, and a mark inside of a word is a part of the word. Each character of Chinese or Japanese is
    a word.

    Args:
        sentence: The sentence.

    Returns:
        The words in the order of the sentence; together they have all characters except white
        space.

    Examples:
        >>> from fastbert.data.words import split_words
        >>> [word.text for word in split_words("“Ada-Mae's 3.5 m,” said she.")]
        ['“', "Ada-Mae's", '3.5', 'm', ',', '”', 'said', 'she', '.']
    """
    return [
        Word(sentence[start:end], start)
        for match in re.finditer(r"\S+", sentence)
        for start, end in _parts(sentence, *match.span())
    ]


def _parts(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each word of ``text[start:end]``, which has no white space."""
    for match in re.finditer(f"{_ALONE.pattern}|((?!{_ALONE.pattern}).)+", text[start:end], re.S):
        first, last = start + match.start(), start + match.end()
        while first < last and _is_mark(text[first]):
            yield first, first + 1
            first += 1
        inner = last
        while inner > first and _is_mark(text[inner - 1]):
            inner -= 1
        if inner > first:
            yield first, inner
        for place in range(inner, last):
            yield place, place + 1


def _is_mark(character: str) -> bool:
    """Return whether a character is punctuation or a symbol."""
    return unicodedata.category(character)[0] in "PS"
