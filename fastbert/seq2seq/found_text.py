"""Paragraphs of text that every machine with Python has, or that the user names."""

from __future__ import annotations

import os
import re

from fastbert.data.corpus import read_documents

# A paragraph of prose begins with a capital letter and ends like a sentence.
_PROSE = re.compile(r"[A-Z][^\n]*[.:!?]")
FEWEST_WORDS = 8


def paragraphs(corpus: str | os.PathLike[str] | None) -> list[str]:
    """Return paragraphs of text, each on one line and each once.

    Args:
        corpus: A file or folder, as for ``fastbert pretrain``, whose documents become paragraphs.
            None takes the language reference of Python, in English, which ``help()`` shows.

    Returns:
        The paragraphs, without repeated blanks. Those of the language reference are in ASCII.

    Raises:
        FileNotFoundError: If `corpus` does not exist.
        ValueError: If there is no text.
        ImportError: If `corpus` is None and this Python has no language reference.
    """
    if corpus is not None:
        texts = [" ".join(document) for document in read_documents(corpus)]
        return list(dict.fromkeys(" ".join(text.split()) for text in texts))
    found = [" ".join(text.split()) for topic in _topics() for text in re.split(r"\n\s*\n", topic)]
    prose = (text for text in found if _PROSE.fullmatch(text) and text.isascii())
    return list(dict.fromkeys(text for text in prose if text.count(" ") >= FEWEST_WORDS))


def _topics() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ImportError(
            "corpus: got None, but this Python was installed without pydoc_data, the text of "
            "help(); allowed: a file or folder of text"
        ) from error
    return [topics[name] for name in sorted(topics)]
