"""Every command has help and a short import, and reports mistakes and bugs differently."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fastbert.atomic_file import write_atomically
from fastbert.cli import common
from fastbert.json_file import jsonable
from fastbert.ops import backend
from fastbert.testing import parity
from fastbert.version import __version__

COMMANDS = (
    *("info", "check", "bench", "demo", "pretrain", "predict", "fill-mask", "encode", "classify"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_ends_with_an_example(run, command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: fastbert {command}" in result.stdout
    assert "--json" in result.stdout


def test_help_lists_every_command(run):
    result = run("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f" {command} " in result.stdout


def test_version(run):
    assert run("--version").stdout.strip() == f"fastbert {__version__}"


def test_unknown_command(run):
    assert run("speedup").exit_code == 2


def test_help_does_not_import_torch():
    code = (
        "import sys\n"
        "from fastbert.cli import app\n"
        "try:\n    app(['check', '--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()


def test_module_runs_like_the_script():
    command = [sys.executable, "-m", "fastbert", "fill-mask", "no such folder", "x"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: MODEL: got 'no such folder'")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_without_all_characters_is_no_error(encoding):
    """Characters that an encoding lacks, such as the ellipsis in this help, are escaped."""
    result = subprocess.run(
        [sys.executable, "-m", "fastbert", "encode", "--help"],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        encoding=encoding,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert r"N,N,\u2026" in result.stdout


def test_a_bug_keeps_its_traceback(run, monkeypatch):
    monkeypatch.setattr("fastbert.machine.describe", lambda: 1 / 0)
    result = run("info")
    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)


def test_choices_are_those_of_the_library():
    assert backend.BACKENDS == common.BACKENDS
    names = tuple(str(dtype).removeprefix("torch.") for dtype in parity.DTYPES)
    assert names == common.DTYPES


def test_jsonable_has_no_number_that_json_lacks():
    text = json.dumps(jsonable({"a": float("nan"), "b": [float("inf"), 1.5], "c": (1, True)}))
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": [1, True]}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / "rows.npy"
    target.write_text("old")

    def fail(temporary):
        temporary.write_text("half")
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError):
        write_atomically(target, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]
    assert target.read_text(encoding="utf-8") == "old"
