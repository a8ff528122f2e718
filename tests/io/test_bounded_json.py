"""JSON files have limits for size, number of values and depth, which are checked before parsing."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import pytest
from killing import child, end_of

from fastbert import json_file
from fastbert.data import corpus, records
from fastbert.data.pieces import cut, read_piece
from fastbert.data.squad import read_questions
from fastbert.jobs.texts import Texts
from fastbert.training.log import read_log

SECONDS = 10
# `dense` repeats these fragments. A parser needs memory of many times the size of such a file.
DENSE = {"lists": "[],", "objects": '{"a":1},', "strings": '"abc",', "quotes": '""""', "mixed": ","}


def nested(levels: int) -> str:
    return '{"text":' + '[{"a":' * (levels // 2) + "5" + "}]" * (levels // 2) + "}"


def dense(kind: str, size: int) -> str:
    return "[" + DENSE[kind] * (size // len(DENSE[kind]) - 1) + "1]"


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("size", [json_file.MAX_BYTES, 3 * json_file.MAX_BYTES])
def test_no_file_of_settings_needs_more_than_a_quarter_of_a_gigabyte(
    kind: str, size: int, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(dense(kind, size))

    def read() -> None:
        start, used = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if size > json_file.MAX_BYTES or kind in ("lists", "quotes", "mixed"):
            with pytest.raises(ValueError, match=str(path)):
                json_file.read(path, list)
        else:
            json_file.read(path, list)
        assert time.process_time() - start < SECONDS
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 1 << 18  # in KiB

    assert end_of(child(read)) == 0


@pytest.mark.parametrize("kind", ["lists", "objects", "strings"])
def test_data_have_no_more_values_than_an_eighth_of_their_bytes(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(dense(kind, 1 << 26))

    def read() -> None:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ValueError, match=r"a\.json: .*values, allowed: at most 8,388,60"):
            list(read_questions(tmp_path / "a.json"))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 1 << 20  # in KiB

    assert end_of(child(read)) == 0


@pytest.mark.parametrize("levels", [99, 101, 199, 900, 200_000])
def test_levels(levels: int, tmp_path: Path) -> None:
    text = nested(levels)
    if levels < json_file.MAX_DEPTH:
        assert json_file.parse(text) == json.loads(text)
        return
    with pytest.raises(ValueError, match="nested more deeply than allowed: at most 100 levels"):
        json_file.parse(text)
    for name, read in {
        "a.json": lambda path: json_file.read(path),
        "a.jsonl": lambda path: list(records.read_records(path, ("text",))),
        "b.jsonl": lambda path: list(corpus.read_documents(path)),
        "c.jsonl": lambda path: [list(read_piece(piece)) for piece in cut([path], 1 << 20)],
        "d.jsonl": lambda path: list(Texts(path, ("text",))),
        "log.jsonl": read_log,
    }.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=name):
            read(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "' + "[{" * 500 + '"}',
        '{"a": "' + '\\"[' * 500 + '\\\\", "b": [5, {"]": "}"}]}',
        "[" + ",".join(["[]"] * 500) + "]",
        '"' + "\\\\" * 501 + '"',
    ],
)
def test_brackets_in_strings_and_side_by_side_are_no_levels(text: str) -> None:
    assert json_file.parse(text) == json.loads(text)


@pytest.mark.parametrize("text", ["[" * 500, "]" * 500, "[}" * 500, '"[' * 501, "[" * 10**6])
def test_brackets_without_a_partner_are_no_json(text: str) -> None:
    start = time.process_time()
    with pytest.raises(ValueError, match=r"line 1 column|recursion depth|nested"):
        json_file.parse(text)
    assert time.process_time() - start < SECONDS


@pytest.mark.parametrize("text", [r'{"a": "x\ud800y"}', r'{"a": {"\uDFFF": [1]}}'])
def test_half_of_a_surrogate_pair_is_named(text: str, tmp_path: Path) -> None:
    """Reading one half of a surrogate pair is an error, because UTF-8 cannot represent it."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON: .*surrogate"):
        json_file.read(tmp_path / "config.json")


@pytest.mark.parametrize("text", [r'{"a": "\ud83d\ude00"}', r'{"a": "\\ud800"}'])
def test_a_whole_surrogate_pair_and_its_escape_are_text(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert json_file.read(tmp_path / "config.json") == json.loads(text)


def test_a_sparse_file_of_settings(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 1 << 40)
    with pytest.raises(ValueError, match=r"config\.json: it has 1,099,511,627,776 bytes, allowed"):
        json_file.read(tmp_path / "config.json")
