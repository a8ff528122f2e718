"""``fastbert pretrain`` leaves whole files after a signal, after a kill, and on a full disk."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quick_cases import long_case

from fastbert.data import WordPieceTokenizer, stories
from fastbert.modules import BertForPreTraining

SMALL = (
    "--preset", "tiny", "--config", "hidden_size=16", "--config", "num_hidden_layers=1",
    "--config", "intermediate_size=32", "--vocab-size", "200", "--max-length", "24",
    "--tokens-per-batch", "96", "--log-every", "1", "--eval-batches", "2",
)  # fmt: skip
# A shell makes background jobs ignore SIGINT, so this script restores Python's handler.
START = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from fastbert.cli import main
main()
"""
# A limit on the file size, which is set before a step, simulates a full disk.
FULL = """
import json, os, resource
from fastbert.training import pretraining_run
limits, step = json.loads(os.environ["LIMITS"]), pretraining_run.PretrainingRun.train_step
def limited(self, batch):
    limit = limits.get(str(self.step + 1))
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return step(self, batch)
pretraining_run.PretrainingRun.train_step = limited
from fastbert.cli import main
main()
"""
KILLED = """
import os
os.fsync = lambda handle: os.kill(os.getpid(), 9)
from fastbert.cli import main
main()
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "stories.txt"
    path.write_text("\n\n".join("\n".join(document) for document in stories(40, 0)))
    return path


@pytest.fixture
def start(corpus: Path, tmp_path: Path):
    """Return a function that starts ``fastbert pretrain`` as the leader of a process group."""

    def call(code: str, *more: object, **environment: str) -> subprocess.Popen:
        arguments = ("pretrain", corpus, tmp_path / "out", *SMALL, *more)
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "500", **environment},
            start_new_session=True,
        )

    return call


def wait_for_steps(process: subprocess.Popen, log: Path) -> None:
    """Wait until the run has logged three steps."""
    deadline = time.monotonic() + 300
    while not log.exists() or log.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def assert_whole(model: Path) -> None:
    vocabulary = WordPieceTokenizer.load(model).vocab_size
    assert BertForPreTraining.from_pretrained(model).config.vocab_size == vocabulary


@pytest.mark.parametrize(
    ("name", "to"),
    [
        long_case("SIGTERM", "process"),
        long_case("SIGINT", "group"),
        long_case("SIGTERM", "group"),
        long_case("SIGINT", "process"),
    ],
)
def test_a_signal_ends_the_run_with_a_checkpoint_and_its_status(
    start, run, corpus, tmp_path, name, to
) -> None:
    out, number = tmp_path / "out", getattr(signal, name)
    process = start(START, "--steps", 100_000, "--workers", int(to == "group"))
    wait_for_steps(process, out / "log.jsonl")
    send = os.killpg if to == "group" else os.kill
    send(process.pid, number)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 128 + number, output
    steps = len((out / "log.jsonl").read_text(encoding="utf-8").splitlines())
    kept = f"kept: log.jsonl, curves.png, the checkpoint of step {steps}"
    assert f"stopped by {name} after step {steps} of 100000; {kept}" in output
    assert "Traceback" not in output
    assert names(out) == {"log.jsonl", "curves.png", "model", "checkpoints"}
    assert_whole(out / "model")
    # Another run must not overwrite the files of the stopped run.
    weights = (out / "model" / "model.safetensors").read_bytes()
    again = run("pretrain", corpus, out, *SMALL, "--steps", 2)
    assert again.exit_code == 2
    assert "steps: got 2, but the run in" in again.output
    assert "has 100000; allowed: the same, another folder, or overwrite=True" in again.output
    assert (out / "model" / "model.safetensors").read_bytes() == weights


@pytest.mark.every_case
def test_the_same_command_after_a_killed_save_runs_and_cleans_up(
    start, run, corpus, tmp_path
) -> None:
    out, steps = tmp_path / "out", ("--steps", 2)
    process = start(KILLED, *steps)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == -signal.SIGKILL, output
    left = names(out)
    assert not (out / "model").exists()
    assert len(left - {"log.jsonl"}) == 1
    result = run("pretrain", corpus, out, *SMALL, *steps)
    assert result.exit_code == 0, result.output
    assert names(out) == {"log.jsonl", "curves.png", "model", "checkpoints"}
    assert_whole(out / "model")


@pytest.mark.every_case
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(start, tmp_path) -> None:
    limits = json.dumps({"3": 4000, "5": -1})
    process = start(FULL, "--steps", 6, "--save-every", 2, LIMITS=limits)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    failed = [line for line in output.splitlines() if "could not be written" in line]
    assert len(failed) == 1
    assert failed[0].startswith("step 4: the checkpoint could not be written: ")
    assert os.strerror(errno.EFBIG) in failed[0]
    assert failed[0].endswith("; training continues")
    assert names(tmp_path / "out") == {"log.jsonl", "curves.png", "model", "checkpoints"}
    assert_whole(tmp_path / "out" / "model")


@pytest.mark.every_case
@pytest.mark.parametrize("first", [long_case(None), 2])
def test_a_disk_that_stays_full_ends_in_an_error_and_keeps_the_earlier_checkpoint(
    start, tmp_path, first
) -> None:
    out, start_of_limit = tmp_path / "out", 1 if first is None else 3
    limits = json.dumps({str(start_of_limit): 4000})
    process = start(FULL, "--steps", 6, "--save-every", 2, LIMITS=limits)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 2, output
    assert "Traceback" not in output
    last = output.strip().splitlines()[-1]
    assert last.startswith("error: could not be written at the end of the run: the checkpoint: ")
    kept = "no checkpoint" if first is None else "the checkpoint of step 2"
    assert f"kept: log.jsonl, {kept}" in last
    assert len((out / "log.jsonl").read_text(encoding="utf-8").splitlines()) == 7
    assert names(out) == {"log.jsonl"} | (set() if first is None else {"model", "checkpoints"})
    if first is not None:
        assert_whole(out / "model")


def test_a_log_that_cannot_be_written_does_not_lose_the_run(run, corpus, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "log.jsonl").symlink_to("/dev/full")
    result = run("pretrain", corpus, tmp_path / "out", *SMALL, "--steps", 3)
    assert result.exit_code == 2
    assert "step 1: log.jsonl could not be written: " in result.output
    assert os.strerror(errno.ENOSPC) in result.output
    assert "kept: curves.png, the checkpoint of step 3" in result.output
    assert_whole(tmp_path / "out" / "model")
