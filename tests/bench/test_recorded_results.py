"""Recorded benchmark files have at most 300 lines, and a page of the CPU is that of its JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cpu import report

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SECTIONS = sorted(path for name in report.ORDER for path in RESULTS.glob(f"*/{name}.json"))
MOST_LINES = 300


def test_no_record_is_longer_than_a_reader_reads():
    for path in RESULTS.rglob("*"):
        if path.suffix in (".md", ".json"):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES, path


@pytest.mark.parametrize("path", SECTIONS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_page_of_a_section_is_that_of_its_writer(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    assert path.with_suffix(".md").read_text(encoding="utf-8") == "\n".join(
        [*report.page(content), ""]
    )
