"""Reading a folder with a subfolder of text files for each label, such as the IMDB reviews."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fastbert.data.records import Record
from fastbert.text_file import read_text

# The IMDB reviews (Maas et al. 2011) have texts without a label in this subfolder.
UNLABELLED = "unsup"


def read_text_folder(folder: Path) -> Iterator[Record]:
    """Read the texts of ``folder/<label>/*.txt``, sorted by label and name.

    The subfolder ``unsup`` and files of another suffix are not read.

    Args:
        folder: The folder.

    Yields:
        Records with two values: the text, and the label, which is the name of the subfolder.
        ``Record.place`` is the path of the file.

    Raises:
        ValueError: If there is no text, or if a file is empty or not valid text. The message names
            the file or the folder.
    """
    labels = sorted(path for path in folder.iterdir() if path.is_dir() and path.name != UNLABELLED)
    any_text = False
    for label in labels:
        for path in sorted(label.glob("*.txt")):
            text = read_text(path)
            if not text.strip():
                raise ValueError(f"{path}: the file is empty, allowed: a text")
            any_text = True
            yield Record(str(path), (text, label.name))
    if not any_text:
        raise ValueError(f"{folder}: no texts, allowed: a subfolder of .txt files for each label")
