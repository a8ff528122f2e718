"""The page in the repository equals a new build of its sources."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

VIEWER = Path(__file__).parents[2] / "fastbert" / "viewer"


def test_a_rebuild_is_equal_to_the_committed_page(tmp_path):
    node, packages = shutil.which("node"), VIEWER / "web" / "node_modules"
    if node is None or not packages.is_dir():
        pytest.skip("no node with the packages of the page: `make test-viewer` installs them")
    out = tmp_path / "page.html"
    result = subprocess.run(
        [node, "build.mjs", str(out)], cwd=VIEWER / "web", capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert out.read_bytes() == (VIEWER / "page.html").read_bytes()
