"""Reading and writing follow no link in place of a folder or file, and reading deletes nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from small_model import CONFIG

from fastbert import modules
from fastbert.io import commit

SECONDS = 5


class Folders(NamedTuple):
    """A folder with a model, and another folder of the user that must not change."""

    model: Path
    outside: Path


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    made = Folders(tmp_path / "model", tmp_path / "outside")
    modules.BertModel(CONFIG).save_pretrained(made.model)
    for part in (commit.NEW, commit.OLD):
        (made.outside / part).mkdir(parents=True)
        (made.outside / part / commit.CONFIG).write_text(part)
    return made


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """Fail a test that does not end in time."""

    def end(*_: object) -> None:
        pytest.fail(f"it did not end within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def content_of(folder: Path) -> dict[str, bytes | None]:
    """Return the bytes of each file below `folder`, and None for each folder below `folder`."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def make_commit(folder: Path, *parts: str) -> Path:
    """Make the folder of a commit with `parts`; the part ``new`` has a configuration."""
    place = folder / commit.COMMITTED
    for part in parts:
        (place / part).mkdir(parents=True)
    if commit.NEW in parts:
        (place / commit.NEW / commit.CONFIG).write_text("{}")
    return place


def link_the_commit(model: Path, outside: Path) -> None:
    (model / commit.COMMITTED).symlink_to(outside)


def link_the_commit_to_nothing(model: Path, outside: Path) -> None:
    (model / commit.COMMITTED).symlink_to(outside / "absent")


def put_a_file_in_its_place(model: Path, outside: Path) -> None:
    (model / commit.COMMITTED).write_text("mine")


def link_the_lock(model: Path, outside: Path) -> None:
    place = make_commit(model, commit.NEW, commit.OLD)
    (place / commit.LOCK).symlink_to(outside / "lock")


def link_the_lock_to_a_missing_folder(model: Path, outside: Path) -> None:
    place = make_commit(model, commit.NEW, commit.OLD)
    (place / commit.LOCK).symlink_to(outside / "absent" / "lock")


def link_the_new_files(model: Path, outside: Path) -> None:
    (make_commit(model, commit.OLD) / commit.NEW).symlink_to(outside / commit.NEW)


def link_the_old_files(model: Path, outside: Path) -> None:
    (make_commit(model, commit.NEW) / commit.OLD).symlink_to(outside / commit.OLD)


def leave_no_place_for_the_old_files(model: Path, outside: Path) -> None:
    make_commit(model, commit.NEW)


def fill_the_place_of_the_old_files(model: Path, outside: Path) -> None:
    place = make_commit(model, commit.NEW, commit.OLD)
    (place / commit.OLD / commit.CONFIG).write_text("mine")


REFUSED = (
    link_the_commit, link_the_commit_to_nothing, put_a_file_in_its_place, link_the_lock,
    link_the_lock_to_a_missing_folder, link_the_new_files, link_the_old_files,
    leave_no_place_for_the_old_files, fill_the_place_of_the_old_files,
)  # fmt: skip


@pytest.mark.parametrize("prepare", REFUSED, ids=lambda prepare: prepare.__name__)
def test_a_place_that_no_save_made_is_an_error_and_nothing_is_moved(prepare, folders) -> None:
    prepare(*folders)
    before = [content_of(folder) for folder in folders]
    for act in (modules.BertModel.from_pretrained, modules.BertModel(CONFIG).save_pretrained):
        with pytest.raises(OSError, match="allowed: ") as caught:
            act(folders.model)
        assert str(folders.model) in str(caught.value)
        after = [content_of(folder) for folder in folders]
        # The lock file may be new, because it is made in the commit's folder before the check.
        for content in (before[0], after[0]):
            content.pop(f"{commit.COMMITTED}/{commit.LOCK}", None)
        assert after == before


def test_a_commit_with_foreign_files_is_finished_and_nothing_is_deleted(folders) -> None:
    place = make_commit(folders.model, commit.NEW, commit.OLD)
    (place / "README.md").write_text("mine")
    old = (folders.model / commit.CONFIG).read_bytes()
    (place / commit.NEW / commit.CONFIG).write_bytes(old + b" ")
    assert modules.BertModel.from_pretrained(folders.model).config == CONFIG
    assert (folders.model / commit.CONFIG).read_bytes() == old + b" "
    (left,) = folders.model.glob(f"{commit.STAGED}*")
    assert (left / "README.md").read_text(encoding="utf-8") == "mine"
    assert (left / commit.OLD / commit.CONFIG).read_bytes() == old
    modules.BertModel(CONFIG).save_pretrained(folders.model)
    assert not left.exists()


def test_links_among_staged_folders_are_left_alone(folders) -> None:
    linked = folders.model / f"{commit.STAGED}link"
    linked.symlink_to(folders.outside)
    dead = folders.model / f"{commit.STAGED}dead"
    dead.mkdir()
    (dead / commit.LOCK).symlink_to(folders.outside / "lock")
    before = content_of(folders.outside)
    modules.BertModel(CONFIG).save_pretrained(folders.model)
    assert content_of(folders.outside) == before
    assert os.readlink(linked) == str(folders.outside)


def test_a_model_folder_that_is_a_link_is_read_and_written(folders) -> None:
    link = folders.outside / "link"
    link.symlink_to(folders.model)
    make_commit(folders.model, commit.NEW, commit.OLD)
    (folders.model / commit.COMMITTED / commit.NEW / commit.CONFIG).write_bytes(
        (folders.model / commit.CONFIG).read_bytes()
    )
    assert modules.BertModel.from_pretrained(link).config == CONFIG
    modules.BertModel(CONFIG).save_pretrained(link)
    assert len(list(folders.model.iterdir())) == 2
