"""The INPUT of encode and classify: the texts that are read, and the errors, which name a line."""

from __future__ import annotations

import json
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet

from fastbert.jobs.texts import Texts, check_output

PAIRS = [("a b", "c"), ("", "zwölf 漢字\u2028no new line"), ("[SEP]", "")]


def write(path, pairs=PAIRS):
    """Write pairs as fields a and b of a .jsonl or .parquet, or their first texts as a .txt."""
    if path.suffix == ".txt":
        path.write_text("".join(first + "\n" for first, _ in pairs), encoding="utf-8")
    elif path.suffix == ".jsonl":
        lines = (json.dumps({"b": b, "a": a, "id": 1}) + "\n" for a, b in pairs)
        path.write_text("".join(lines), encoding="utf-8")
    else:
        columns = {"b": [b for _, b in pairs], "a": [a for a, _ in pairs]}
        parquet.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".PARQUET"])
def test_fields_in_the_order_asked_for(tmp_path, suffix):
    path = tmp_path / f"texts{suffix}"
    write(path.with_suffix(suffix.lower())).rename(path)
    texts = Texts(path, ("a", "b"))
    assert list(texts) == list(texts) == PAIRS
    assert texts.count == len(PAIRS)
    assert list(Texts(path, ("b",))) == [(b,) for _, b in PAIRS]


def test_the_digest_is_of_the_texts(tmp_path):
    lines = [("ab", "c"), ("", "d")]
    first, same = (write(tmp_path / name, lines) for name in ("1.jsonl", "2.parquet"))
    digest = Texts(first, ("a", "b")).digest
    assert Texts(same, ("a", "b")).digest == digest
    others = ([("a", "bc"), ("", "d")], [("ab", "c"), ("d", "")], lines[:1], lines[::-1])
    for index, other in enumerate(others):
        path = write(tmp_path / f"other{index}.jsonl", other)
        assert Texts(path, ("a", "b")).digest != digest


def test_a_txt_with_a_mark_and_no_last_newline(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\r\n two ")
    assert list(Texts(path, ("text",))) == [("one",), ("",), (" two ",)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\nlatin \xe9\n", "line 2: expected text in UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', "line 2: expected an object with a string"),
        ("a.jsonl", b'{"text": "a"}\n["text"]\n', "line 2: expected an object with a string"),
        ("a.jsonl", b'{"text": "a"}\n\n', "line 2: expected an object with a string field text"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: expected text in UTF-8"),
        ("a.jsonl", b"[" * 100_000, "line 1: expected an object"),
        ("a.parquet", b"PAR1 not really", "not a readable parquet file"),
        ("a.txt", b"", "has no lines"),
        ("a.csv", b"a", r"allowed: a \.txt, \.jsonl, \.parquet file"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Texts(tmp_path / name, ("text",))


def test_columns_and_nulls_of_a_parquet(tmp_path):
    path = tmp_path / "texts.parquet"
    parquet.write_table(pa.table({"title": ["a", None], "id": [1, 2]}), path)
    with pytest.raises(ValueError, match="has no column 'text', allowed: title, id"):
        Texts(path, ("text",))
    with pytest.raises(ValueError, match="line 2: expected a string in the column title"):
        Texts(path, ("title",))
    with pytest.raises(ValueError, match="line 1: expected a string in the column id"):
        Texts(path, ("id",))


def test_a_txt_has_no_fields(tmp_path):
    with pytest.raises(ValueError, match=r"got title of a \.txt, allowed: fields of"):
        Texts(write(tmp_path / "texts.txt"), ("title",))


def test_out_is_checked_before_any_work(tmp_path, monkeypatch):
    source = write(tmp_path / "texts.jsonl")
    with pytest.raises(ValueError, match="INPUT itself; allowed: another name"):
        check_output(tmp_path / "." / "texts.jsonl", source, (".jsonl",))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="OUT: parquet needs pyarrow; install it, or fastbert's"):
        check_output(tmp_path / "out.parquet", source, (".parquet",))
    with pytest.raises(ImportError, match="INPUT: parquet needs pyarrow"):
        Texts(tmp_path / "texts.parquet", ("text",))


def test_a_parquet_with_two_columns_of_the_name(tmp_path):
    columns = [pa.array(["a"]), pa.array(["b"]), pa.array([1])]
    table = pa.Table.from_arrays(columns, names=["text", "text", "id"])
    parquet.write_table(table, tmp_path / "texts.parquet")
    with pytest.raises(ValueError, match="has 2 columns 'text', allowed: text, text, id"):
        Texts(tmp_path / "texts.parquet", ("text",))
    assert list(Texts(write(tmp_path / "other.parquet"), ("a", "b"))) == PAIRS
