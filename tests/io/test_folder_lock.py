"""Only one run at a time holds the lock of a folder, and a killed run does not hold the lock."""

from __future__ import annotations

import os
import signal
import time

import pytest
from killing import child, end_of

from fastbert.folder_lock import lock, locked, unlock

REFUSED = r"^output: another run is writing into .*out, allowed: one run at a time"


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path) -> None:
    folder = tmp_path / "out"
    with locked(folder, "output"):
        (folder / "file").touch()
        with pytest.raises(ValueError, match=REFUSED), locked(folder, "output"):
            pytest.fail("it was not refused")
    with locked(folder, "output"):
        pass
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_an_empty_folder_that_the_lock_made_is_deleted_and_no_other(tmp_path) -> None:
    (tmp_path / "given").mkdir()
    with locked(tmp_path / "given" / "new" / "out", "output"), locked(tmp_path / "given", "output"):
        assert (tmp_path / "given" / "new" / "out").is_dir()
    assert list((tmp_path / "given").iterdir()) == []


def test_a_killed_run_holds_no_lock_though_its_own_processes_live_on(tmp_path) -> None:
    reader, writer = os.pipe()

    def hold() -> None:
        lock(tmp_path / "out", "output")
        # The run forks this child, which lives longer than the run, like a loader of batches.
        os.write(writer, child(lambda: time.sleep(60)).to_bytes(8, "little"))
        time.sleep(60)

    run = child(hold)
    forked = int.from_bytes(os.read(reader, 8), "little")
    try:
        with pytest.raises(ValueError, match=REFUSED):
            lock(tmp_path / "out", "output")
        os.kill(run, signal.SIGKILL)
        assert end_of(run) == -signal.SIGKILL
        unlock(lock(tmp_path / "out", "output"))
    finally:
        os.kill(forked, signal.SIGKILL)


def test_a_patient_run_waits_for_the_end_of_another(tmp_path) -> None:
    reader, writer = os.pipe()

    def hold() -> None:
        lock(tmp_path / "out", "output")
        os.write(writer, b"1")
        time.sleep(0.5)

    run = child(hold)
    os.read(reader, 1)
    unlock(lock(tmp_path / "out", "output", patience=30.0))
    assert end_of(run) == 0


def test_a_folder_that_is_deleted_while_its_lock_is_taken_is_made_again(
    tmp_path, monkeypatch
) -> None:
    folder, opened = tmp_path / "out", os.open

    def delete_once_opened(path, *arguments):
        handle = opened(path, *arguments)
        if path == folder and not opened_before:
            opened_before.append(folder.rmdir())
        return handle

    opened_before: list[None] = []
    monkeypatch.setattr(os, "open", delete_once_opened)
    handle = lock(folder, "output")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=REFUSED):
        lock(folder, "output")
    unlock(handle)
