"""The fuzzer finds no failure in some cases of every target, and reports inserted mistakes."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import fuzz
import pytest
from fuzz_pool import LATE, Limits
from fuzz_targets import TARGETS, Target
from quick_cases import long_case


def quiet(text: str) -> None:
    """Print nothing."""


def test_no_damaged_file_ends_badly(tmp_path: Path) -> None:
    """Three cases of each target end in an allowed way; `make fuzz` runs many more cases."""
    cases = 3 * len(TARGETS)
    with fuzz.opened(list(TARGETS.values()), tmp_path / "out") as fuzzing:
        fuzz.fuzz(fuzzing, seed=0, seconds=300, most=cases, say=quiet)
        assert fuzzing.failures == {}
        assert fuzzing.cases == cases


def raise_key_error(path: Path) -> None:
    raise KeyError("entry")


def raise_without_a_name(path: Path) -> None:
    raise ValueError("something is wrong")


def raise_with_a_name(path: Path) -> None:
    raise ValueError(f"{path}: wrong")


def never_end(path: Path) -> None:
    while True:
        pass


def sleep(path: Path) -> None:
    time.sleep(60)


def fill_the_memory(path: Path) -> None:
    bytearray(1 << 32)


def crash(path: Path) -> None:
    os.abort()


def leave(path: Path) -> None:
    os._exit(3)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (raise_key_error, "failure", "KeyError at test_fuzz"),
        (raise_without_a_name, "failure", "the file is not named"),
        (raise_with_a_name, "refused", ""),
        long_case(len, "failure", "the file is not named"),
        (never_end, "failure", LATE),
        long_case(sleep, "failure", LATE),
        (fill_the_memory, "failure", "MemoryError"),
        (crash, "failure", "SIGABRT"),
        long_case(leave, "failure", "status 3"),
        (str, "success", ""),
    ],
)
def test_a_fault_of_a_reader_is_reported_and_kept(fault, kind, words, tmp_path) -> None:
    def build(folder: Path) -> None:
        (folder / "a.txt").write_text("sound\n" * 20)

    def read(folder: Path) -> None:
        if (folder / "a.txt").read_bytes() != b"sound\n" * 20:
            fault(folder)

    target = Target("lines", build, read, special=0.0)
    limits = Limits(seconds=1.0, memory=1 << 28)
    # Case 1 of seed 0 changes the file of this target.
    with fuzz.opened([target], tmp_path / "out", limits) as fuzzing:
        outcome = fuzzing.run(target, 0, 1)
        assert outcome.kind == kind
        assert re.search(words, outcome.signature)
        if fault is raise_key_error:
            fuzzing.run(target, 0, 1)
        assert len(fuzzing.failures) == (kind == "failure")
    kept = sorted(path.name for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert kept == (["a.txt", "case.txt"] if kind == "failure" else [])
    if kept:
        told = (tmp_path / "out" / "lines-0-1" / "case.txt").read_text(encoding="utf-8")
        assert "python tests/fuzz/fuzz.py --case lines/0/1\na.txt: " in told


def test_a_case_depends_on_its_name_alone(tmp_path: Path) -> None:
    target = TARGETS["sentence-transformers"]
    with fuzz.opened([target], tmp_path / "out") as fuzzing:
        first = [fuzzing.damaged(target, 5, number)[1] for number in range(20)]
        again = [fuzzing.damaged(target, 5, number)[1] for number in reversed(range(20))]
        other = [fuzzing.damaged(target, 6, number)[1] for number in range(20)]
    assert first == again[::-1]
    assert first != other


@pytest.mark.every_case
def test_the_status_is_that_of_the_cases(tmp_path, monkeypatch, capsys) -> None:
    def read(folder: Path) -> None:
        if not (folder / "a.txt").read_bytes().startswith(b"sound"):
            raise KeyError("entry")

    def build(folder: Path) -> None:
        (folder / "a.txt").write_text("sound")

    for reader, status in ((read, 1), (lambda folder: None, 0)):
        target = Target("lines", build, reader, special=0.0)
        monkeypatch.setitem(TARGETS, "lines", target)
        command = ["--targets", "lines", "--cases", "20", "--out", str(tmp_path / "out")]
        assert fuzz.main(command) == status
        assert ("FAILED lines/0/" in capsys.readouterr().out) == bool(status)
