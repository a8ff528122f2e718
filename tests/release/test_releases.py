"""The changelog has the form of Keep a Changelog, and no public name is lost without a word."""

from __future__ import annotations

import json
import os
import re
import tarfile

import changelog
import public_api
import pytest
import release_check

from fastbert.version import __version__

RELEASES = changelog.read(changelog.FILE.read_text(encoding="utf-8"))
NUMBERED = [release for release in RELEASES if release.version != "Unreleased"]


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_the_newest_section_is_what_is_not_released_or_this_version():
    assert RELEASES[0].version in ("Unreleased", __version__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)


def test_versions_fall_and_have_dates():
    versions = [numbers(release.version) for release in NUMBERED]
    assert versions == sorted(versions, reverse=True)
    assert all(release.date for release in NUMBERED)
    assert all(release.changes for release in RELEASES)
    assert all(lines for release in RELEASES for lines in release.changes.values())


def test_each_public_name_of_the_last_release_exists_or_was_announced():
    """A name may go only after a release in which it was deprecated; see docs/releases.md."""
    before = json.loads(public_api.RECORD.read_text(encoding="utf-8"))
    removed = " ".join(line for r in RELEASES for line in r.changes.get("Removed", ()))
    deprecated = " ".join(line for r in NUMBERED for line in r.changes.get("Deprecated", ()))
    for name in public_api.lost(before, public_api.collect()):
        assert f"`{name}`" in removed, f"{name} is gone, and CHANGELOG.md does not say so"
        assert f"`{name}`" in deprecated, f"{name} was removed and never deprecated"


def test_a_lost_name_and_a_lost_parameter_are_found():
    before = {"a": {"f": ["x", "y"], "g": None, "h": []}, "b": {"k": None}}
    now = {"a": {"f": ["y", "z"], "g": ["x"]}}
    assert public_api.lost(before, now) == ["a.f(x)", "a.h", "b.k"]
    assert public_api.lost(before, before) == []


def test_a_repacked_archive_has_the_same_bytes_and_files(tmp_path):
    found = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        (folder / "p" / "q").mkdir(parents=True)
        for name in sorted(("a.txt", "q/b.txt"), reverse=number == 2):
            (folder / "p" / name).write_text(name, "utf-8")
            os.utime(folder / "p" / name, (number, number))
        archive = folder / "p.tar.gz"
        with tarfile.open(archive, "w:gz") as packed:
            packed.add(folder / "p", "p")
        release_check.repack(archive, 1_700_000_000)
        found.append(archive.read_bytes())
        with tarfile.open(archive) as packed:
            assert packed.getnames() == ["p", "p/a.txt", "p/q", "p/q/b.txt"]
            assert packed.extractfile("p/q/b.txt").read() == b"q/b.txt"
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("## 1.0\n", r"line 1: got '## 1.0', allowed"),
        ("## [1.0.0] - 2026\n", r"line 1"),
        ("## [Unreleased]\n### New\n", r"line 2: got 'New', allowed: Added"),
    ],
)
def test_a_heading_of_another_form_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        changelog.read(text)
