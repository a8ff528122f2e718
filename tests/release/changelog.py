"""Reads CHANGELOG.md, which follows Keep a Changelog 1.1.0."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).resolve().parents[2] / "CHANGELOG.md"
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
HEADING = re.compile(r"## \[(Unreleased|\d+\.\d+\.\d+)\](?: - (\d{4}-\d{2}-\d{2}))?$")


class Release(NamedTuple):
    """A section of the file: its version or "Unreleased", its date, and its lines by kind."""

    version: str
    date: str | None
    changes: dict[str, list[str]]


def read(text: str) -> list[Release]:
    """Return the sections of a changelog, the newest first.

    Raises:
        ValueError: If a heading is not one of Keep a Changelog; the message has the line.
    """
    releases: list[Release] = []
    kind = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("## "):
            match = HEADING.match(line)
            if match is None:
                raise ValueError(f"line {number}: got {line!r}, allowed: ## [x.y.z] - YYYY-MM-DD")
            releases.append(Release(match[1], match[2], {}))
            kind = ""
        elif line.startswith("### "):
            kind = line.removeprefix("### ")
            if kind not in KINDS:
                raise ValueError(f"line {number}: got {kind!r}, allowed: {', '.join(KINDS)}")
            releases[-1].changes[kind] = []
        elif line.startswith("- "):
            releases[-1].changes[kind].append(line.removeprefix("- "))
        elif line.startswith("  ") and kind:
            releases[-1].changes[kind][-1] += " " + line.strip()
    return releases
