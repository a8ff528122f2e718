"""``fastbert demo`` has the right arguments and exit status; tests/demo tests the demo itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fastbert.demo.report import Target


@dataclass(frozen=True)
class FakeReport:
    passed: bool
    report: Path
    targets: list[Target]
    seconds: dict[str, float] = field(default_factory=lambda: {"Corpus": 1.0, "Speed": 2.0})


@pytest.fixture(params=[True, False])
def demo(request, monkeypatch):
    """Replace the demo by a function that records its calls, and that meets or misses a target."""
    calls = []

    def run_demo(folder, **options):
        calls.append((folder, options))
        target = Target("held-out accuracy", "71.0%", "at least 85%", request.param)
        return FakeReport(request.param, Path(folder) / "report.md", [target])

    monkeypatch.setattr("fastbert.demo.demo.run_demo", run_demo)
    return request.param, calls


def test_exit_status_and_targets(run, demo, tmp_path):
    passed, calls = demo
    result = run("demo", "--out", tmp_path / "d", "--seed", 3, "--corpus", "text.txt")
    assert result.exit_code == (0 if passed else 1)
    assert "held-out accuracy" in result.stdout
    assert ("MISSED" in result.stdout) == (not passed)
    assert str(tmp_path / "d" / "report.md") in result.stdout
    ((folder, options),) = calls
    assert folder == tmp_path / "d"
    assert options["seed"] == 3
    assert options["corpus"] == Path("text.txt")


def test_json(run, demo):
    passed, _ = demo
    content = json.loads(run("demo", "--json").stdout)
    assert content["passed"] is passed
    assert content["targets"][0]["figure"] == "71.0%"


def test_a_folder_that_is_a_file(refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "is a file" in refused("demo", "--out", tmp_path / "file")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"
