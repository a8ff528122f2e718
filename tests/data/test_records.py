"""Rows of .csv, .tsv, .jsonl and .parquet files are read; errors name the file and the line."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import lzma
import random
import warnings

import pyarrow as pa
import pytest
from pyarrow import parquet

from fastbert.data.records import DataWarning, NoField, read_records

TEXTS = ("plain", 'with "quotes", commas', "two\nlines", "zwölf 漢字\u2028\x0bno new line", "")


def written(suffix: str, texts: list[str], tmp_path) -> bytes:
    """Return the bytes of a file in the format `suffix`, with the texts in the column ``a``."""
    if suffix == ".jsonl":
        rows = [json.dumps({"b": 1, "a": text}, ensure_ascii=draw_ascii(text)) for text in texts]
        return "\n".join(rows).encode()
    if suffix == ".parquet":
        parquet.write_table(pa.table({"b": [1] * len(texts), "a": texts}), tmp_path / "written")
        return (tmp_path / "written").read_bytes()
    file = io.StringIO(newline="")
    quoting = csv.QUOTE_ALL if suffix == ".tsv" else csv.QUOTE_MINIMAL
    delimiter = {".csv": ",", ".tsv": "\t", ";.csv": ";", "\t.csv": "\t"}[suffix]
    writer = csv.writer(file, delimiter=delimiter, quoting=quoting)
    writer.writerows([["b", "a"], *([1, text] for text in texts)])
    return file.getvalue().encode()


def draw_ascii(text: str) -> bool:
    return len(text) % 2 == 0


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet", ";.csv", "\t.csv"])
def test_generated_texts_are_the_same_in_every_format_encoding_and_compression(tmp_path, suffix):
    draw = random.Random(suffix)
    alphabet = "ab \"',;\t\n\r\\#.é漢🦉\u2028\u00a0\ufeff\x0b{["
    texts = ["".join(draw.choices(alphabet, k=draw.randint(0, 12))) for _ in range(300)]
    texts += [*TEXTS, "long " * 50_000]
    content = written(suffix, texts, tmp_path)
    ends = [""] if suffix == ".parquet" else ["", ".gz", ".xz", ".zst"]
    encodings = ["utf-8"] if suffix == ".parquet" else ["utf-8", "utf-8-sig", "utf-16"]
    for end, encoding in itertools.product(ends, encodings):
        path = tmp_path / f"rows{suffix.strip(';').strip()}{end}"
        recoded = content if encoding == "utf-8" else content.decode().encode(encoding)
        path.write_bytes(COMPRESS[end](recoded))
        records = list(read_records(path, ("a", "b"), ("c",)))
        assert [record.values[0] for record in records] == texts
        assert {(str(record.values[1]), record.values[2]) for record in records} == {("1", None)}


COMPRESS = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pa.compress(content, "zstd", asbytes=True),
}


def test_quotation_marks_of_a_tsv_are_text(tmp_path):
    path = tmp_path / "train.tsv"
    lines = ["label\ttext", '1\t"A row begins', "0\tplain", '1\tand " ends"', '0\t"whole"']
    path.write_text("\r\n".join(lines))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = list(read_records(path, ("text",)))
    texts = ['"A row begins', "plain", 'and " ends"', '"whole"']
    assert [record.values[0] for record in records] == texts


def test_fields_of_a_tsv_that_a_program_enclosed_are_noted(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text('label\ttext\n1\t"so ""quoted"""\n0\tplain\n')
    with pytest.warns(DataWarning, match=rf"^{path}: 1 rows have fields such as .* write a .csv"):
        records = list(read_records(path, ("text",)))
    assert records[0].values[0] == '"so ""quoted"""'
    path.write_text('label\ttext\n1\t"two\nlines"\n0\tplain\n')
    with pytest.raises(ValueError, match=r"line 3: got 1 fields, .*: a text with a tab or a line"):
        list(read_records(path, ("text",)))


def test_columns_by_number_of_a_file_without_names(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text("gj04\t1\t\tThey drank.\ngj04\t0\t*\tThey drank the.\n")
    records = list(read_records(path, ("4", "2")))
    assert [record.values for record in records] == [
        ("They drank.", "1"),
        ("They drank the.", "0"),
    ]
    with pytest.raises(ValueError, match=r"line 1: no column '5', allowed: 1, 2, 3, 4"):
        list(read_records(path, ("5", "2")))
    path.write_text("1\t2\na\tb\n")
    assert [record.values for record in read_records(path, ("2",))] == [("b",)]


def test_blanks_around_the_names_of_columns_do_not_count(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text, label\ngood, pos\n")
    assert [record.values for record in read_records(path, ("text", "label"))] == [("good", " pos")]


def test_the_limit_of_other_readers_of_the_process_stays(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("a\n" + "long" * 50_000 + "\n")
    before = csv.field_size_limit()
    records = read_records(path, ("a",))
    next(records)
    assert csv.field_size_limit() == before
    with pytest.raises(csv.Error):
        list(csv.reader([path.read_text().split("\n")[1]]))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_a_field_that_is_absent_has_an_error_of_its_own(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(written(path.suffix, ["x"], tmp_path))
    with pytest.raises(NoField, match=r"no (field|column) 'z'") as failure:
        list(read_records(path, ("a", "z")))
    assert failure.value.field == "z"


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
        ("r.jsonl", '{"a": 1}\n{"a": "\\ud800"}\n', "line 2: not valid JSON: a string has \\ud800"),
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
