"""Reading of text files, compressed or uncompressed, in UTF-8, UTF-16 or UTF-32."""

from __future__ import annotations

import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from fastbert.file_size import check_file

# The suffixes of compressed files, which come after the suffix of the content, as in .csv.gz.
COMPRESSED = (".gz", ".xz", ".zst")
# The largest size, in bytes, of a text that is read into memory as a whole.
MOST_BYTES = 1 << 33
_BLOCK = 1 << 20
# Maps byte order marks to encodings. UTF-32 comes before UTF-16, because the little-endian mark of
# UTF-32 begins with the little-endian mark of UTF-16.
MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def content_name(path: Path) -> str:
    """Return the name of a file without the suffix of its compression.

    Examples:
        >>> from pathlib import Path
        >>> from fastbert.text_file import content_name
        >>> content_name(Path("data/Train.csv.gz"))
        'Train.csv'
    """
    return path.stem if path.suffix.lower() in COMPRESSED else path.name


def content_suffix(path: Path) -> str:
    """Return the suffix of the content in lower case: ``".csv"`` for ``Train.CSV.gz``."""
    return Path(content_name(path)).suffix.lower()


def open_bytes(path: Path) -> BinaryIO:
    """Open a file, and decompress it while it is read if its suffix is one of ``COMPRESSED``.

    Args:
        path: Path of the file.

    Returns:
        A stream of the uncompressed bytes. The caller must read the stream inside `damage_named`,
        which adds the file name to the error of a damaged file.

    Raises:
        OSError: If the file cannot be opened.
        ImportError: If the file is a .zst file and pyarrow is not installed.
    """
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    if suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    file = path.open("rb")
    if suffix != ".zst":
        return file
    try:
        from pyarrow import CompressedInputStream
    except ImportError as error:
        file.close()
        raise ImportError(
            f"reading {path} needs pyarrow; install it, or fastbert's extra 'train'"
        ) from error
    stream: Any = CompressedInputStream(file, "zstd")
    return io.BufferedReader(stream)


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Raise ValueError if a damaged compressed file causes an error in the with block.

    The message names the file. Errors of the file system are raised unchanged.
    """
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # This error is from the file system.
        raise ValueError(f"{path}: not a readable {path.suffix.lower()} file: {error}") from error


def encoding_of(start: bytes) -> str:
    """Return the encoding that the byte order mark in `start` names, or UTF-8 without a mark.

    Args:
        start: The first four bytes of a file.
    """
    return next((name for mark, name in MARKS.items() if start.startswith(mark)), "utf-8")


def is_plain(path: Path) -> bool:
    """Return whether a file is uncompressed UTF-8, so that parts of the file can be read alone."""
    return path.suffix.lower() not in COMPRESSED and _encoding(path).startswith("utf-8")


def _encoding(path: Path) -> str:
    with damage_named(path), open_bytes(path) as file:
        return encoding_of(file.read(4))


def open_text(path: Path) -> TextIO:
    r"""Open a file as text, in which every line end becomes ``\n``; `read_text` names the files."""
    return io.TextIOWrapper(open_bytes(path), _encoding(path))


def lines_in_utf8(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, each with its line end, converted to UTF-8 from any encoding.

    Invalid bytes of a UTF-8 file and lone surrogates of UTF-16 or UTF-32 become bytes that are not
    valid UTF-8, and the caller must refuse them.

    Args:
        path: Path of a file that `read_text` can read.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged, or if UTF-16 or UTF-32 cannot be decoded. The message
            names the file.
        ImportError: If the file is a .zst file and pyarrow is not installed.
    """
    encoding = _encoding(path)
    errors = "surrogateescape" if encoding.startswith("utf-8") else "surrogatepass"
    with damage_named(path), open_bytes(path) as file:
        text = io.TextIOWrapper(file, encoding, errors, newline="\n")
        while True:
            try:
                line = text.readline()
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: not {encoding.upper()}: {error.reason}") from error
            if not line:
                return
            yield line.encode("utf-8", errors)


def read_text(path: Path) -> str:
    """Return the text of a file, without its byte order mark.

    Args:
        path: Path of a file in UTF-8, or in UTF-16 or UTF-32 with a byte order mark. The file may
            be compressed in a format of ``COMPRESSED``.

    Returns:
        The text, with the line ends of the file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged or not in its encoding, or if its text is larger than
            ``MOST_BYTES``. The message names the file, and also the line of a byte that cannot be
            decoded.
        ImportError: If the file is a .zst file and pyarrow is not installed.
    """
    # A pipe has no size, and is read to its end.
    if path.is_file():
        check_file(path, MOST_BYTES)
    content = bytearray()
    with damage_named(path), open_bytes(path) as file:
        # One read of MOST_BYTES would allocate that memory at once, so blocks are read.
        while block := file.read(_BLOCK):
            content += block
            if len(content) > MOST_BYTES:
                message = f"its text has more bytes than allowed: at most {MOST_BYTES:,}"
                raise ValueError(f"{path}: {message}")
    encoding = encoding_of(bytes(content[:4]))
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        before = bytes(content[: error.start]).decode(encoding, errors="replace")
        name = encoding.removesuffix("-sig").upper()
        line = before.count("\n") + 1
        raise ValueError(f"{path}, line {line}: not {name}: {error.reason}") from error
