"""A record in JSON reads back unchanged, has a line for each row, and is short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastbert import json_file

ROOT = Path(__file__).resolve().parents[2]
LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=3), VALUES))
def test_a_record_reads_back_as_it_was(value):
    assert json.loads(json_file.record(value)) == value


def test_a_record_has_a_line_for_each_row(tmp_path):
    value = {
        "machine": {"cpu": "x", "cores": 2},
        "rows": [{"name": "a", "times": [1.5, float("inf")]}, {"name": "b"}],
        "launches": {"one": {"n": 1}, "two": {}},
        "lengths": [1, 2],
        "faults": [],
    }
    json_file.write(tmp_path / "record.json", value, json_file.record)
    assert (tmp_path / "record.json").read_text("utf-8").split("\n") == [
        "{",
        ' "machine": {"cpu": "x", "cores": 2},',
        ' "rows": [',
        '  {"name": "a", "times": [1.5, null]},',
        '  {"name": "b"}',
        " ],",
        ' "launches": {',
        '  "one": {"n": 1},',
        '  "two": {}',
        " },",
        ' "lengths": [1, 2],',
        ' "faults": []',
        "}",
        "",
    ]


RECORDS = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_a_record_of_the_repository_is_short(path):
    text = path.read_text("utf-8")
    assert text.count("\n") <= 300
    assert text == json_file.record(json.loads(text))
