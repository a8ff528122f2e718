import builtins
import gzip
import json
import lzma
import sys
import warnings

import pytest

from fastbert.data import CorpusWarning, read_documents


def read(path):
    return list(read_documents(path))


def test_txt_has_a_document_between_blank_lines_and_joins_wrapped_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\nThe first line\ngoes on here. Second one.\n  \n\nOther document.\n\n")
    assert read(path) == [
        ["The first line goes on here.", "Second one."],
        ["Other document."],
    ]


def test_lines_that_are_sentences_stay_apart(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("he met dr.\nthe end of it.\n")
    assert read(path) == [["he met dr.", "the end of it."]]


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("One here.\r\n\r\nTwo there.\r\n".encode("utf-8-sig"))
    assert read(path) == [["One here."], ["Two there."]]


def test_jsonl_record_is_one_document(tmp_path):
    path = tmp_path / "a.jsonl"
    records = [{"text": "One. Two.\n\nThree."}, {"text": "", "id": 1}, {"text": "Four."}]
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    assert read(path) == [["One.", "Two.", "Three."], ["Four."]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 2: not valid JSON"),
        ('{"body": "x"}', 'line 2: no "text" field; the fields are: body'),
        ('["x"]', "line 2: got a list"),
        ('{"text": 3}', 'line 2: "text" is int'),
        ("[" * 100_000, "line 2: not valid JSON"),
        ('{"text": ' + "9" * 5000 + "}", "line 2: not valid JSON"),
    ],
)
def test_jsonl_errors_name_file_and_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "Good."}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_jsonl_invalid_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(ValueError, match="line 1: not valid JSON in UTF-8"):
        read(path)


def test_a_parquet_with_two_text_columns(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.Table.from_arrays([pa.array(["a b."]), pa.array(["c d."])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet has 2 columns 'text', allowed: text, text"):
        read(tmp_path / "a.parquet")


def test_a_parquet_with_text_that_is_not_utf8(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    latin = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xe9")]
    )
    pq.write_table(pa.table({"text": latin}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: not a readable parquet file"):
        read(tmp_path / "a.parquet")


def test_parquet_streams_row_groups(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    texts = [f"Document {i}. It ends." for i in range(10)] + [None, ""]
    pq.write_table(pa.table({"id": list(range(12)), "text": texts}), path, row_group_size=3)
    assert read(path) == [[f"Document {i}.", "It ends."] for i in range(10)]


def test_parquet_errors(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), path)
    with pytest.raises(ValueError, match="has no column 'text', allowed: body, id"):
        read(path)
    pq.write_table(pa.table({"text": [1]}), path)
    with pytest.raises(ValueError, match='row 1: "text" is int'):
        read(path)
    path.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match="not a readable parquet file"):
        read(path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    original = builtins.__import__

    def without_pyarrow(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("pyarrow")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"")
    with pytest.raises(ImportError, match="needs pyarrow"):
        read(path)


def test_folder_is_read_sorted_and_each_file_once(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "LGPL-2.1").write_text("Licence text.\n")
    (tmp_path / "LGPL").symlink_to(tmp_path / "b" / "LGPL-2.1")
    (tmp_path / "a.txt").write_text("First.\n")
    (tmp_path / "README.md").write_text("Read me.\n")
    (tmp_path / ".hidden").write_text("Hidden.\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(tmp_path) == [["Licence text."], ["Read me."], ["First."]]


def test_prose_gathers_paragraphs_and_txt_does_not(tmp_path):
    text = "".join(f"Paragraph {i}. It goes on.\n\n" for i in range(10))
    (tmp_path / "prose").write_text(text)
    (tmp_path / "lines.txt").write_text(text)
    assert [len(document) for document in read(tmp_path / "prose")] == [8, 8, 4]
    assert [len(document) for document in read(tmp_path / "lines.txt")] == [2] * 10


def test_unreadable_files_of_a_folder_are_counted(tmp_path):
    (tmp_path / "good.txt").write_text("Good.\n")
    (tmp_path / "latin.txt").write_bytes("caf\xe9 au lait".encode("latin-1"))
    (tmp_path / "cut.txt").write_bytes("caf\xe9".encode()[:-1])
    (tmp_path / "changelog.gz").write_bytes(gzip.compress(b"text", mtime=0))
    (tmp_path / "program").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "page.html").write_text("<p>")
    expected = r"5 files skipped \(1 binary .*, 1 compressed, 2 not UTF-8, 1 other suffix\)"
    with pytest.warns(CorpusWarning, match=expected):
        assert read(tmp_path) == [["Good."]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"one\n\ncaf\xe9 au lait\n", r"a\.txt, line 3, is not UTF-8"),
        ("a.txt", "text".encode("utf-16-le"), "binary or UTF-16"),
        ("a.txt", "text\n".encode("utf-16") + b"\x00\xd8", r"a\.txt, line 2, is not UTF-8"),
        ("a", gzip.compress(b"text", mtime=0), "compressed"),
        ("a.zip", b"PK\0", "binary"),
        ("a.txt", b"", "no text in"),
        ("a.txt", b"\n\n  \n", "no text in"),
        ("a.jsonl", b"", "no text in"),
    ],
)
def test_named_file_must_be_readable(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert ".jsonl, .parquet" in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".md"])
def test_the_same_documents_compressed_and_in_utf_16(tmp_path, suffix, encoding):
    text = "Zwölf ran.\r\nIt is old.\n\nA fox slept.\n"
    if suffix == ".jsonl":
        text = "".join(json.dumps({"text": part}) + "\n" for part in text.split("\n\n"))
    plain = tmp_path / f"plain{suffix}"
    plain.write_bytes(text.encode())
    documents = read(plain)
    folder = tmp_path / "packed"
    folder.mkdir()
    for number, pack in enumerate((gzip.compress, lzma.compress)):
        path = folder / f"{number}{suffix}{['.gz', '.xz'][number]}"
        path.write_bytes(pack(text.encode(encoding)))
        assert read(path) == documents
    (folder / f"2{suffix}").write_bytes(text.encode(encoding))
    if suffix == ".md":
        with pytest.warns(CorpusWarning, match="2 compressed"):
            assert read(folder) == documents
    else:
        assert read(folder) == documents * 3


def test_named_file_is_read_whatever_its_suffix(tmp_path):
    path = tmp_path / "story.en"
    path.write_text("A story.\n")
    assert read(path) == [["A story."]]


def test_empty_folder_and_missing_path(tmp_path):
    with pytest.raises(ValueError, match=r"no text in .* allowed: \.txt"):
        read(tmp_path)
    (tmp_path / "x.png").write_bytes(b"\0")
    with pytest.raises(ValueError, match="files skipped: 1 other suffix"):
        read(tmp_path)
    # The call itself raises the error, before the first document is read.
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_documents(tmp_path / "missing")
