"""Trackers receive the figures of the log; a tracker that is not installed raises an error."""

import struct
import sys
import time

import pytest
from accelerate.utils import LoggerType
from rich.console import Console

from fastbert.training import pretraining_run, trackers
from fastbert.training.log import read_log
from fastbert.training.pretraining import pretrain


def events(folder):
    """Yield step, name and value of each figure in TensorBoard's files, the oldest file first."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.glob("events.*"), key=lambda path: path.stat().st_mtime_ns):
        content = path.read_bytes()
        while content:
            # An entry has a length (8 bytes), a checksum (4), the event, and a checksum (4).
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            if event.session_log.status:
                yield event.step, "start of a session", 0.0
            for value in event.summary.value:
                yield event.step, value.tag, value.simple_value


def test_tensorboard_receives_the_figures_of_the_log(options, documents):
    chosen = options(tracker="tensorboard", eval_every=4)
    result = pretrain(chosen, documents=documents, console=Console(quiet=True))
    logged = {(step, name): value for step, name, value in events(chosen.folder / "tensorboard")}
    rows = read_log(result.log)
    assert {row["event"] for row in rows} == {"train", "evaluation"}
    for row in rows:
        for name, value in row.items():
            if name not in ("event", "step"):
                key = (row["step"], f"{row['event']}/{name}")
                assert logged[key] == pytest.approx(value, rel=1e-6), key


def test_a_resumed_run_hides_the_figures_of_the_steps_that_were_lost(
    options, documents, monkeypatch
):
    chosen = options(tracker="tensorboard", save_every=3, log_every=1)
    original = pretraining_run.PretrainingRun.train_step

    def train_step(self, batch):
        if self.step == 5:
            raise KeyboardInterrupt
        return original(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(pretraining_run.PretrainingRun, "train_step", train_step)
        with pytest.raises(KeyboardInterrupt):
            pretrain(chosen, documents=documents, console=Console(quiet=True))
    # TensorBoard's file names have a resolution of one second, so the next session waits.
    time.sleep(1.0)
    # The run resumes after the checkpoint of step 3.
    pretrain(chosen, documents=documents, console=Console(quiet=True))
    steps = [
        step
        for step, name, _ in events(chosen.folder / "tensorboard")
        if name in ("train/loss", "start of a session")
    ]
    # When a session starts at a step, TensorBoard drops the earlier figures from that step on.
    assert steps == [1, 1, 2, 3, 4, 5, 4, 4, 5, 6, 7, 8]


WANDB = """
import json

class Run:
    def log(self, values, step=None, **_):
        self.lines.write(json.dumps({"step": step, **values}) + "\\n")
    def finish(self):
        self.lines.close()

def init(project, **settings):
    run = Run()
    run.lines = open(settings["dir"] + "/sent.jsonl", "w")
    run.lines.write(json.dumps({"project": project, **settings}) + "\\n")
    return run
"""


def test_wandb_receives_the_options_and_the_figures(options, documents, tmp_path, monkeypatch):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr("accelerate.tracking.is_wandb_available", lambda: True)
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.WANDB])
    chosen = options(tracker="wandb", eval_every=4)
    result = pretrain(chosen, documents=documents, console=Console(quiet=True))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    first, *sent = read_log(chosen.folder / "sent.jsonl")
    assert (first["project"], first["name"]) == ("fastbert", "out")
    assert first["config"]["steps"] == 8
    rows = read_log(result.log)
    assert [row["step"] for row in sent] == [row["step"] for row in rows]
    assert sent[0]["train/mlm_loss"] == rows[0]["mlm_loss"]


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_written(
    options, documents, monkeypatch, tmp_path
):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="tracker: wandb needs wandb: pip install wandb"):
        pretrain(options(tracker="wandb"), documents=documents)
    assert not (tmp_path / "out").exists()
