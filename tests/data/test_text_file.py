"""A text is the same in every encoding and compression; an error names the file and the line."""

from __future__ import annotations

import gzip
import lzma

import pyarrow as pa
import pytest

from fastbert import text_file
from fastbert.text_file import content_name, content_suffix, read_text

TEXT = "plain\r\nzwölf 漢字 🦉\u2028\x0b\n\n" * 2000
PACK = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pa.compress(content, "zstd", asbytes=True),
    ".GZ": gzip.compress,
}


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_the_text_is_the_same(tmp_path, suffix, encoding):
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    content = mark + TEXT.encode(encoding)
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACK[suffix](content))
    assert read_text(path) == TEXT
    # Programs that compress in parallel write several compressed frames into one file.
    path.write_bytes(PACK[suffix](content[:999]) + PACK[suffix](content[999:]))
    assert read_text(path) == TEXT


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("content", ["half", "garbage", "40 bytes"])
def test_a_damaged_file_is_named(tmp_path, suffix, content):
    path = tmp_path / f"a.jsonl{suffix}"
    whole = PACK[suffix](TEXT.encode())
    damaged = {"half": whole[: len(whole) // 2], "garbage": b"garbage" * 9, "40 bytes": whole[:40]}
    path.write_bytes(damaged[content])
    with pytest.raises(ValueError, match=rf"^{path}: not a readable {suffix} file: "):
        read_text(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"one\ntwo\n\xff", "line 3: not UTF-8: invalid start byte"),
        (b"one\n\xed\xa0\x80\n", "line 2: not UTF-8: "),
        ("one\ntwo\n".encode("utf-16") + b"\x00\xd8a\x00", "line 3: not UTF-16: "),
        ("one\n".encode("utf-16") + b"a", "line 2: not UTF-16: truncated data"),
    ],
)
def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path, content, message):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match=rf"^{path}, {message}"):
        read_text(path)


def test_a_small_file_with_a_large_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text_file, "MOST_BYTES", 1000)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"a" * 1001))
    with pytest.raises(ValueError, match=r"more bytes than allowed: at most 1,000"):
        read_text(path)
    path.write_bytes(gzip.compress(b"a" * 1000))
    assert len(read_text(path)) == 1000


def test_the_suffix_of_the_content(tmp_path):
    assert content_suffix(tmp_path / "Train.CSV.gz") == ".csv"
    assert content_suffix(tmp_path / "train.csv") == ".csv"
    assert content_name(tmp_path / "V2.0.json.zst") == "V2.0.json"
