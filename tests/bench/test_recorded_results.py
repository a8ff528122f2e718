"""Recorded benchmark files have at most 300 lines, and each cpu.md matches its JSON files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cpu import report

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
MOST_LINES = 300


def test_no_record_is_longer_than_a_reader_reads():
    for path in RESULTS.rglob("*"):
        if path.suffix in (".md", ".json"):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES, path


@pytest.mark.parametrize("record", [path.parent.name for path in RESULTS.glob(f"*/{report.PAGE}")])
def test_the_page_of_the_cpu_is_that_of_its_writer(record):
    page = (RESULTS / record / report.PAGE).read_text(encoding="utf-8")
    assert page == "\n".join(report.page(RESULTS / record)) + "\n"
