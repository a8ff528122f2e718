"""Rows of .csv, .tsv, .jsonl and .parquet files, and errors that name the file and the line."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from fastbert.data.records import read_records

TEXTS = ("plain", 'with "quotes", commas', "two\nlines", "zwölf 漢字\u2028\x0bno new line", "")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet", ".CSV"])
def test_texts_survive_every_format(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        lines = (json.dumps({"b": 1, "a": text}, ensure_ascii=False) for text in TEXTS)
        path.write_text("\n".join(lines), encoding="utf-8")
    elif suffix == ".parquet":
        parquet.write_table(pa.table({"b": [1] * len(TEXTS), "a": list(TEXTS)}), path)
    else:
        mark = "\t" if suffix == ".tsv" else ","
        rows = [["b", "a"], *(["1", text] for text in TEXTS)]
        quoted = (mark.join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows)
        path.write_bytes("\r\n".join(quoted).encode("utf-8-sig"))
    records = list(read_records(path, ("a", "b")))
    assert [record.values[0] for record in records] == list(TEXTS)
    assert {str(record.values[1]) for record in records} == {"1"}


def test_places_are_lines_of_the_file(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('a\n"two\nlines"\n\nplain\n')
    places = [record.place for record in read_records(path, ["a"])]
    assert places == [f"{path}, line 2", f"{path}, line 5"]
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"a": 1}\n\n{"a": 2}\n')
    places = [record.place for record in read_records(path, ["a"])]
    assert places == [f"{path}, line 2", f"{path}, line 4"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.csv", "a,b\n1,2\n1\n3,4\n", "line 3: got 1 fields, allowed: 2, as in the first line"),
        ("r.csv", "a,b\n1,2\n1,2,3\n", "line 3: got 3 fields, allowed: 2"),
        ("r.csv", 'a,b\n1,"2\n3,4\n', "line 2: a broken row: unexpected end of data"),
        ("r.csv", 'a,b\n1,2\n"1"x,2\n', "line 3: a broken row: "),
        ("r.csv", "b,c\n1,2\n", "line 1: no column 'a', allowed: b, c"),
        ("r.csv", "a,a\n1,2\n", "line 1: 2 columns 'a', allowed: a, a"),
        ("r.jsonl", '{"a": 1}\n{"a": \n{"a": 2}\n', "line 2: not valid JSON: "),
        ("r.jsonl", '{"a": 1}\n[1]\n', "line 2: got a list, allowed: an object"),
        ("r.jsonl", '{"a": 1}\n{"b": 2}\n', "line 2: no field 'a'; the fields are: b"),
        ("r.csv", b"a\n1\n\xff\n", "line 3: not UTF-8: "),
        ("r.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "line 2: not UTF-8: "),
        ("r.parquet", b"PAR1", "not a readable parquet file"),
        ("r.csv", "", "the file has no rows, allowed: at least one"),
        ("r.csv", "a\n\n", "the file has no rows, allowed: at least one"),
        ("r.jsonl", "\n", "the file has no rows, allowed: at least one"),
        ("r.xls", "a", "got the suffix '.xls', allowed: .csv, .tsv, .jsonl, .parquet"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError) as failure:
        list(read_records(path, ["a"]))
    assert str(failure.value).startswith(str(path))
    assert message in str(failure.value)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_file_that_does_not_exist_is_named(tmp_path, suffix):
    with pytest.raises(FileNotFoundError, match=f"nowhere{suffix}"):
        list(read_records(tmp_path / f"nowhere{suffix}", ["a"]))
