"""`encode` and `classify` read the right texts from INPUT, and their errors name a line."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import sys

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from fastbert.jobs.texts import Texts, check_output

PAIRS = [("a b", "c"), ("", "zwölf 漢字\u2028no new line"), ("[SEP]", "")]


def write(path, pairs=PAIRS):
    """Write pairs as the fields a and b of a .jsonl or .parquet, or their first texts as a .txt."""
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


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".tsv"])
def test_compressed_texts_and_those_in_utf_16_are_the_same(tmp_path, suffix, encoding):
    texts = ["zwölf 漢字", "a\u2028b", "🦉", ""]
    lines = texts if suffix == ".txt" else ["text", *texts]
    if suffix == ".jsonl":
        lines = [json.dumps({"text": text}, ensure_ascii=len(text) == 1) for text in texts]
    if suffix == ".csv":
        lines[-1] = '""'
    elif suffix == ".tsv":
        lines, texts = lines[:-1], texts[:-1]
    content = "\r\n".join([*lines, ""]).encode(encoding)
    for pack, end in ((bytes, ""), (gzip.compress, ".gz"), (lzma.compress, ".xz")):
        path = tmp_path / f"a{suffix}{end}"
        path.write_bytes(pack(content))
        assert [text for (text,) in Texts(path, ("text",))] == texts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\nlatin \xe9\n", "line 2: expected text in UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', "line 2: expected an object with a string"),
        ("a.jsonl", b'{"text": "a"}\n["text"]\n', "line 2: expected an object with a string"),
        ("a.jsonl", b'{"text": "a"}\n\n', "line 2: expected an object with a string field text"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: .* half of a surrogate pair"),
        ("a.jsonl", b"[" * 100_000, "line 1: expected an object"),
        ("a.parquet", b"PAR1 not really", "not a readable parquet file"),
        ("a.txt", b"", "has no lines"),
        ("a.pdf", b"a", r"allowed: a \.txt, \.jsonl, \.csv, \.tsv, \.parquet file"),
        ("a.csv", b"text,label\n", r"INPUT: .*a\.csv: the file has no rows"),
        ("a.csv", b"title,label\na,b\n", r"INPUT: .*a\.csv, line 1: no column 'text'"),
        ("a.tsv", b"text\tlabel\na\n", r"INPUT: .*a\.tsv, line 2: got 1 fields"),
        ("a.csv", b"text\nlatin \xe9\n", r"INPUT: .*a\.csv, line 2: not UTF-8"),
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
    with pytest.raises(ValueError, match=r"got text, id of a \.txt, allowed: fields of"):
        Texts(write(tmp_path / "texts.txt"), ("text",), id_field="id")


# These texts have no line breaks, tabs and quotation marks, which not every format can represent.
# They have no byte-order mark, because a mark at the start of a .txt is not part of the text.
PLAIN = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"], exclude_characters='"\ufeff')
)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(PLAIN, st.text(st.characters(codec="utf-8", exclude_characters="\0")))))
def test_every_format_gives_the_same_texts(tmp_path, pairs):
    rows = [{"id": f"r{i}", "text": a, "other": b} for i, (a, b) in enumerate(pairs)]
    rows.append({"id": "last", "text": "one", "other": 'two, "three"\nfour\r\n'})
    (tmp_path / "a.txt").write_text("".join(row["text"] + "\n" for row in rows), encoding="utf-8")
    lines = (json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text("".join(lines), encoding="utf-8")
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
        names = ["id", "text", "other"][: 3 if suffix == ".csv" else 2]
        with (tmp_path / f"a{suffix}").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, delimiter=delimiter, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    expected = [(row["text"],) for row in rows]
    digests = set()
    for suffix in (".txt", ".jsonl", ".csv", ".tsv", ".parquet"):
        texts = Texts(tmp_path / f"a{suffix}", ("text",))
        assert list(texts) == expected
        digests.add(texts.digest)
    assert len(digests) == 1
    for suffix in (".jsonl", ".csv", ".parquet"):
        texts = Texts(tmp_path / f"a{suffix}", ("other", "text"), id_field="id")
        assert list(texts) == [(row["other"], row["text"]) for row in rows]
        assert list(texts.ids()) == [row["id"] for row in rows]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_ids_are_texts_or_integers(tmp_path, suffix):
    def texts(ids, name="id"):
        path = tmp_path / f"texts{suffix}"
        if suffix == ".jsonl":
            rows = ({"id": value, "text": "a"} for value in ids)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            parquet.write_table(pa.table({"id": ids, "text": ["a"] * len(ids)}), path)
        return Texts(path, ("text",), id_field=name)

    numbers = texts([3, -5, 3])
    assert (numbers.id_type, list(numbers.ids())) == (int, [3, -5, 3])
    names = texts(["x", "", "x"])
    assert (names.id_type, list(names.ids())) == (str, ["x", "", "x"])
    assert numbers.digest != Texts(numbers.path, ("text",)).digest != names.digest
    assert list(texts(["x"], "text").ids()) == ["a"]
    wrong = [[1, None], [1.5], [True]]
    if suffix == ".jsonl":
        wrong += [[1, "1"], ["1", 1], [2**63], [["a"]]]
    for ids in wrong:
        allowed = "allowed: a text or an integer of 64 bits, of one type in all lines"
        with pytest.raises(ValueError, match=rf"line {len(ids)}: got .* in id, {allowed}"):
            texts(ids)


def test_ids_of_a_file_that_changes_are_refused(tmp_path):
    path = tmp_path / "texts.csv"
    path.write_text("id,text\n1,a\n2,b\n")
    texts = Texts(path, ("text",), id_field="id")
    path.write_text("id,text\n1,a\n3,b\n")
    with pytest.raises(ValueError, match=r"texts\.csv changed while it was read"):
        list(texts.ids())


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
