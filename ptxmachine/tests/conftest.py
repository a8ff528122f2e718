"""Stop the tests if the installed ptxmachine differs from the sources in the repository."""

from pathlib import Path

import pytest

import ptxmachine

INSTALLED = Path(ptxmachine.__file__).parent
SOURCES = Path(__file__).parents[1] / "src" / "ptxmachine"


def pytest_configure():
    for source in sorted(SOURCES.glob("*.py")):
        installed = INSTALLED / source.name
        if not installed.exists() or installed.read_bytes() != source.read_bytes():
            raise pytest.UsageError(
                f"{installed} is not {source}, so the tests would not test it: "
                "install ptxmachine again, with make setup or pip install ./ptxmachine"
            )
