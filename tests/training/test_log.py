"""A run continues its log, its curves and its messages after the disk was temporarily full."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from fastbert.training.attempts import Attempts
from fastbert.training.log import RunLog, plot_curves, read_log
from fastbert.training.progress import TrainingProgress

ROWS = [{"event": "train", "step": step, "note": "x" * 50} for step in range(1, 6)]


class Disk(io.RawIOBase):
    """A file with a limited size; of a longer write, the part that fits is written."""

    def __init__(self, path: Path, room: int) -> None:
        self.file, self.room = path.open("wb", buffering=0), room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.file.write(data[: self.room])
        self.room -= written
        return written


def test_a_log_goes_on_where_a_full_disk_stopped_it(tmp_path) -> None:
    log = RunLog(tmp_path / "log.jsonl")
    log._file = disk = Disk(tmp_path / "log.jsonl", room=100)
    failed = []
    for row in ROWS:
        if row["step"] == 4:
            disk.room = 10_000
        try:
            log.write(**row)
        except OSError:
            failed.append(row["step"])
    log.close()
    assert failed == [2, 3]
    assert read_log(tmp_path / "log.jsonl") == ROWS == log.rows


def test_a_log_that_cannot_be_written_again_is_named_and_stays(tmp_path, monkeypatch) -> None:
    path = tmp_path / "log.jsonl"
    RunLog(path, ROWS).close()

    def full(self, content) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match=rf"{os.strerror(errno.ENOSPC)}: '{path}'"):
            RunLog(path, ROWS[:3])
    assert read_log(path) == ROWS
    assert [file.name for file in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_write_that_fails_is_told_and_one_that_works_later_is_forgotten() -> None:
    told: list[str] = []
    attempt = Attempts(told.append)

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert not attempt("the checkpoint", full)
    assert told == [f"the checkpoint could not be written: [Errno 28] {os.strerror(errno.ENOSPC)}"]
    assert attempt("the checkpoint", lambda: None)
    attempt.check(kept="all")
    assert not attempt("curves.png", full)
    with pytest.raises(OSError, match=r"at the end of the run: curves\.png: .* kept: the rest"):
        attempt.check(kept="the rest")
    with pytest.raises(RuntimeError):
        attempt("the checkpoint", lambda: (_ for _ in ()).throw(RuntimeError))
    assert not attempt.draw("curves.png", full)
    assert attempt.draw("curves.png", lambda: None)
    assert not attempt.draw("curves.png", lambda: 1 / 0)
    assert told[-1] == "curves.png could not be drawn: ZeroDivisionError: division by zero"
    attempt.check(kept="all")


def test_curves_that_cannot_be_written_leave_no_file(drawn, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "0")
    (tmp_path / ".curves.0.png").symlink_to("/dev/full")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        plot_curves([], tmp_path / "curves.png")
    assert not list(tmp_path.iterdir())


def training_row() -> dict[str, float]:
    row = {"mlm_loss": 1.0, "mlm_accuracy": 0.5, "nsp_loss": 1.0, "nsp_accuracy": 0.5}
    return row | {"learning_rate": 0.1, "tokens_per_second": 5.0, "step": 1}


def test_progress_in_a_narrow_terminal_without_unicode() -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with TrainingProgress(Console(file=shown, force_terminal=True, width=60), 3) as progress:
        progress.report(training_row(), 1.0)
        progress.step()
    shown.flush()
    assert b"mlm 1.000" in shown.buffer.getvalue()


def test_progress_that_cannot_be_shown_does_not_end_the_run() -> None:
    row = training_row()
    with open("/dev/full", "w", encoding="utf-8") as full:
        progress = TrainingProgress(Console(file=full, width=80), 3)
        with progress:
            progress.report(row, 1.0)
            progress.step()
            progress.note("held-out")
        # Bytes that could not be written stay in Python's buffer.
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
