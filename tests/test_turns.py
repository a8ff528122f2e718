"""The slices and gates of CI cover all tests, can be started, and keep to the time limit."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys

import pytest
import turns
from turns import GATES, ROOMS, ROOT


def tracked(*folders: str) -> list[str]:
    command = ["git", "ls-files", *folders]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.skip("this is no checkout")
    return run.stdout.splitlines()


def holds(pattern: str, path: str) -> bool:
    """Return whether `pattern`, which is a folder or a glob in a folder, contains `path`."""
    if "*" not in pattern:
        return path == pattern or path.startswith(pattern + "/")
    return path.count("/") == pattern.count("/") and fnmatch.fnmatchcase(path, pattern)


def test_every_file_of_tests_is_in_one_slice():
    names = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    # tests/ptx/calibration is also in a slice; without headers, its CUTLASS tests are skipped.
    for name in names:
        owners = [
            room for room, of in ROOMS.items() if any(holds(f, name) for f in turns.files_of(of))
        ]
        assert len(owners) == 1, f"{name}: {owners}"


def test_every_source_is_in_one_room():
    for path in tracked("fastbert", "csrc", "kernels", "benchmarks", "docs", "setup.py"):
        if path == "fastbert/kernels":
            continue  # the symlink
        owners = [name for name, room in ROOMS.items() if any(holds(f, path) for f in room.files)]
        assert len(owners) == 1, f"{path}: {owners}"


def test_the_table_in_contributing_is_that_of_the_rooms():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name, room in ROOMS.items():
        files = ", ".join(f"`{file}`" for file in room.files)
        tests = ", ".join(f"`{test}`" for test in room.tests if not test.startswith("!"))
        gates = ", ".join(f"`make {gate}`" for gate in room.gates)
        assert f"| {files} | {tests} | `{name}` | {gates or '–'} |" in text


def test_every_gate_is_a_target_and_every_room_names_gates():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.M))
    assert {command[0] for command in GATES.values()} <= targets
    named = {gate for room in ROOMS.values() for gate in room.gates}
    assert named <= targets
    assert {command[0] for command in GATES.values()} - named <= {"check"}


def test_the_turn_of_a_commit_is_a_slice_and_a_gate():
    tracked("tests")
    of_commit, gate = turns.of_this_commit()
    assert of_commit in ROOMS
    assert gate in GATES


def script(text: str) -> list[str]:
    return [sys.executable, "-u", "-c", text]


WAITS = "import time; time.sleep(60)"
DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"


@pytest.mark.parametrize(
    ("program", "seconds", "failed", "words"),
    [
        ("print('3 passed')", 60, False, "passed"),
        ("raise SystemExit(1)", 60, True, "FAILED"),
        ("print('== 2 failed, 1 passed =='); raise SystemExit(1)", 60, True, "FAILED"),
        (WAITS, 0.5, False, "was ended by the time box"),
        (f"print('FAILED tests/a.py'); {WAITS}", 1.5, True, "FAILED"),
        (f"{DEAF}; {WAITS}", 0.5, False, "was ended by the time box"),
    ],
    ids=["passes", "fails", "fails-in-words", "long", "fails-and-is-long", "deaf"],
)
def test_a_time_box_ends_a_run_and_hides_no_failure(
    monkeypatch, capfdbinary, program, seconds, failed, words
):
    monkeypatch.setattr(turns, "LAST_WORDS", 1)
    outcome = turns.run("slice", script(program), seconds)
    assert outcome.failed is failed
    assert words in str(outcome)
    assert outcome.seconds < 30


def test_no_run_starts_without_time(capsys):
    assert turns.main(["ops", "check", "--minutes", "0"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    words = "was not started, for lack of time"
    assert last == f"fastbert: ops {words}; check {words}"


def test_an_unknown_name_is_an_error(capsys):
    with pytest.raises(SystemExit):
        turns.main(["opps"])
    assert "NAME: got 'opps', allowed: cpu-kernels, gpu-kernels" in capsys.readouterr().err
