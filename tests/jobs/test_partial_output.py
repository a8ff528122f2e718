"""The folder of an unfinished run stays if the run can be resumed, and is removed otherwise."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from fastbert.jobs.encode import write_embeddings
from fastbert.jobs.partial_output import PartialOutput
from fastbert.jobs.reporter import Reporter

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


class Notes(Reporter):
    """A reporter that records its messages."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def opened(folder, reporter=None):
    return PartialOutput(folder / "rows.npy", ROWS.shape, {"model": "a"}, reporter or Notes())


@pytest.fixture(params=["ends", "is interrupted"])
def leave(request):
    """Return a function that does nothing, or interrupts the block ``with leave.stopping``."""

    def leave():
        if request.param == "is interrupted":
            raise KeyboardInterrupt

    leave.stopping = contextlib.suppress(KeyboardInterrupt)
    return leave


def test_rows_of_a_block_without_finish_are_kept(tmp_path, leave):
    reporter = Notes()
    with leave.stopping, opened(tmp_path, reporter) as partial:
        partial.append(ROWS[:3], tokens=7)
        leave()
    (note,) = reporter.notes
    assert note.startswith("stopped: 3 of 4 rows are kept")
    assert not (tmp_path / "rows.npy").exists()
    with opened(tmp_path) as partial:
        assert (partial.done, dict(partial.totals)) == (3, {"tokens": 7})
        partial.append(ROWS[3:])
        partial.finish(None)
    assert np.array_equal(np.load(tmp_path / "rows.npy"), ROWS)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]


def test_a_block_without_rows_leaves_no_folder(tmp_path, leave):
    reporter = Notes()
    with leave.stopping, opened(tmp_path, reporter) as partial:
        assert partial.folder.exists()
        leave()
    assert list(tmp_path.iterdir()) == []
    assert reporter.notes == []


@pytest.mark.parametrize("name", ["rows.npy", "state.json", "whole.npy"])
def test_a_link_to_a_file_elsewhere_is_refused_and_not_followed(tmp_path, name):
    (tmp_path / "mine").write_bytes(b"mine" * 100)
    folder = tmp_path / "rows.npy.partial"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match=f"{name}, allowed: an unfinished run"):
        opened(tmp_path).__enter__()
    assert (tmp_path / "mine").read_bytes() == b"mine" * 100


def test_a_full_disk_names_the_whole_file(tmp_path):
    """On a full disk, which a limit on the file size simulates, the final file is named."""
    resource = pytest.importorskip("resource")
    rows = np.random.default_rng(0).normal(size=(155, 32)).astype(np.float32)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    partial = PartialOutput(tmp_path / "rows.parquet", rows.shape, {"model": "a"}, Notes())

    def write():
        with partial:
            partial.append(rows)
            partial.finish(write_embeddings)

    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"rows\.parquet\.partial/whole\.parquet"):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with partial:
        assert partial.done == 155
        partial.finish(write_embeddings)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]


@pytest.mark.parametrize("end", ["finish", "discard"])
def test_a_folder_that_another_run_makes_after_the_end_is_left_alone(tmp_path, leave, end):
    with leave.stopping, opened(tmp_path) as partial:
        partial.append(ROWS)
        partial.finish(None) if end == "finish" else partial.discard()
        partial.folder.mkdir()
        leave()
    assert partial.folder.exists()
