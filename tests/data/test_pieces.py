"""Files are divided into pieces, each document is in one piece, and errors name file and line."""

import gzip
import json
import lzma
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastbert.data.pieces import LONGEST, cut, find_text, read_piece

COMPRESS = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pa.compress(content, "zstd", asbytes=True),
}


def read(path, piece_bytes):
    pieces = cut([path], piece_bytes)
    return [list(read_piece(piece)) for piece in pieces]


@pytest.fixture
def texts():
    rng = random.Random(0)
    return [f"é{i} " + "word " * rng.randrange(9) + "\nnext." for i in range(60)]


@pytest.mark.parametrize("piece_bytes", [1, 7, 40, 1000, 10**6])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_pieces_of_any_size_have_the_documents_in_order(tmp_path, texts, piece_bytes, suffix):
    path = tmp_path / f"a{suffix}"
    if suffix == ".txt":
        gaps = ["\n\n", "\n\n\n\n", "\r\n\r\n", "\n \t\n"]
        path.write_bytes("".join(t + gaps[i % 4] for i, t in enumerate(texts)).encode("utf-8-sig"))
    elif suffix == ".jsonl":
        path.write_text(
            "".join(json.dumps({"text": t}) + "\n" + "\n" * (len(t) % 2) for t in texts)
        )
    else:
        pq.write_table(pa.table({"text": [*texts, None]}), path, row_group_size=7)
        texts = [*texts, ""]
    documents = read(path, piece_bytes)
    assert [text.strip() for part in documents for text in part] == texts
    if piece_bytes == 40:
        assert sum(map(bool, documents)) > 5


@pytest.mark.parametrize("end", COMPRESS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_the_same_text_compressed_and_in_utf_16(tmp_path, texts, suffix, encoding, end):
    plain, path = tmp_path / f"plain{suffix}", tmp_path / f"a{suffix}{end}"
    lines = [json.dumps({"text": t}) if suffix == ".jsonl" else f"{t}\r\n" for t in texts]
    content = "\n".join(lines) + "\u2028\x0b" * (suffix == ".txt")
    plain.write_bytes(content.encode())
    path.write_bytes(COMPRESS[end](content.encode(encoding)))
    assert find_text(tmp_path)[0] == [path, plain]
    documents = [text for part in read(plain, 200) for text in part]
    assert [text for part in read(path, 200) for text in part] == documents
    broken = content + ("\n\nbad" if suffix == ".txt" else "\n[1]")
    if encoding == "utf-16" and suffix == ".txt":
        raw = broken.encode(encoding) + b"\x00\xd8\n\x00"  # one half of a surrogate pair
    else:
        raw = broken.encode(encoding) + b"\xff" * (suffix == ".txt")
    path.write_bytes(COMPRESS[end](raw))
    number = broken.count("\n") + 1
    with pytest.raises(ValueError, match=rf"^{path}, line {number}: (not UTF-8|got list)"):
        read(path, 200)


def test_small_files_share_a_piece_and_large_ones_are_divided(tmp_path):
    for name, size in (("a", 10), ("b", 10), ("c", 100), ("d", 10)):
        (tmp_path / f"{name}.txt").write_text("x" * size)
    files, skipped = find_text(tmp_path)
    sizes = [[(span.path.stem, span.size) for span in piece] for piece in cut(files, 40)]
    halves = [[("c", 33)], [("c", 33)]]
    assert sizes == [[("a", 10), ("b", 10)], *halves, [("c", 34)], [("d", 10)]]
    assert skipped == 0


def test_a_document_longer_than_the_limit_is_cut_after_a_line(tmp_path):
    line = "x" * 1000 + "\n"
    (tmp_path / "a.txt").write_text(line * (LONGEST // 1000 + 10))
    ((first, second),) = read(tmp_path / "a.txt", 10**9)
    assert first + second == line * (LONGEST // 1000 + 10)
    assert LONGEST < len(first) <= LONGEST + len(line)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "a.jsonl, line 3: not valid JSON"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"title": 1, "id": 2}\n',
            "line 2: got .*: title, id, allowed",
        ),
        ("a.jsonl", b'{"text": 3}\n', 'line 1: got "text" of the type int, allowed'),
        ("a.jsonl", b"[1]\n", "line 1: got list, allowed: an object with a string"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "line 2: not UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: .* half of a surrogate pair"),
        ("a.txt", b"one\n\ntwo\nbad \xe9\n", "a.txt, line 4: not UTF-8"),
    ],
)
@pytest.mark.parametrize("piece_bytes", [3, 1000])
def test_a_broken_line_is_named(tmp_path, name, content, message, piece_bytes):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(path, piece_bytes)


def test_a_broken_row_is_named_in_any_row_group(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [1, 2, 3]}), path, row_group_size=1)
    with pytest.raises(ValueError, match=r'a.parquet, row 3: "text" is int, allowed'):
        list(read_piece(cut([path], 1)[2]))
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"a.parquet: not a readable parquet file"):
        cut([path], 1)


def test_a_folder_without_text_and_a_missing_one_are_named(tmp_path):
    (tmp_path / "a.md").write_text("text")
    with pytest.raises(ValueError, match=r"text: .* is or has no file of .txt, .jsonl, .parquet"):
        find_text(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"text: .*nowhere does not exist"):
        find_text(tmp_path / "nowhere")
