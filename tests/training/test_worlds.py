"""One process, two processes with copies, and two processes with shards train the same model.

A run may continue with another number of processes if the number of batches per step is the same.
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from pretraining_worlds import SETTINGS, accelerate, finish, start, torchrun
from quick_cases import long_case
from rich.console import Console

from fastbert.data import stories
from fastbert.modules import BertForPreTraining
from fastbert.training import PretrainOptions, checkpoints, pretrain
from fastbert.training.log import read_log

# LAMB, the average and the accumulation each add state or gradients that the processes share.
CHANGES = {"accumulate": 2, "optimizer": "lamb", "ema": 0.9, "learning_rate": 0.02, "save_every": 3}


def alone(folder: Path, **changes: object) -> str:
    """Run in this process, with as many batches per step as two processes have together."""
    options = PretrainOptions(folder, **{**SETTINGS, **CHANGES, "accumulate": 4, **changes})
    console = Console(file=io.StringIO(), width=500)
    pretrain(options, documents=list(stories(40, 0)), console=console)
    return console.file.getvalue()


def losses(folder: Path) -> list[list[float]]:
    return [[row["mlm_loss"], row["nsp_loss"]] for row in read_log(folder / "log.jsonl")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Return the folder of an uninterrupted run in one process."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    alone(folder)
    return folder


def assert_close(folder: Path, whole: Path) -> None:
    """Check that log, last checkpoint and exported model of two runs agree to fp32 rounding."""
    assert torch.tensor(losses(whole)).std(dim=0).min() > 1e-3
    torch.testing.assert_close(losses(folder), losses(whole), rtol=1e-5, atol=0.0)
    actual, expected = (checkpoints.newest(f, pytest.fail) for f in (folder, whole))
    assert actual.content["step"] == expected.content["step"] == 6
    for part in ("weights", "optimizer", "average"):
        torch.testing.assert_close(
            actual.tensors(part), expected.tensors(part), rtol=1e-3, atol=2e-6
        )
    exported = checkpoints.weights_of(BertForPreTraining.from_pretrained(folder / "model"))
    average = actual.tensors("average")
    assert all(torch.equal(exported[name], average[name]) for name in average)


@pytest.mark.parametrize(
    ("launcher", "shard"), [(accelerate(2), False), long_case(torchrun(2), True)]
)
@pytest.mark.every_case
def test_two_processes_train_as_one_and_one_continues_them(tmp_path, whole, launcher, shard):
    process = start(tmp_path, launcher, {**CHANGES, "shard": shard})
    text = finish(process)
    assert process.returncode == 0, text[-3000:]
    assert "2 process(es), 2 batches each" in text
    assert_close(tmp_path / "out", whole)
    # In one process, the run that two processes started continues after step 3.
    shutil.rmtree(checkpoints.folder_of(tmp_path / "out", 6))
    text = alone(tmp_path / "out")
    assert "resumed after step 3 of 6" in text
    assert "the checkpoint is of 2 process(es), so dropout draws other masks" in text
    assert_close(tmp_path / "out", whole)


@pytest.mark.every_case
@pytest.mark.parametrize("shard", [False, True])
def test_two_processes_continue_one(tmp_path, whole, shard):
    shutil.copytree(whole, tmp_path / "out")
    shutil.rmtree(checkpoints.folder_of(tmp_path / "out", 6))
    process = start(tmp_path, torchrun(2), {**CHANGES, "shard": shard})
    text = finish(process)
    assert process.returncode == 0, text[-3000:]
    assert "resumed after step 3 of 6" in text
    assert "the checkpoint is of 1 process(es)" in text
    assert_close(tmp_path / "out", whole)


def test_another_number_of_batches_per_step_is_refused(tmp_path, whole):
    with pytest.raises(ValueError, match=r"^processes × accumulate: got 3, but .* has 4;"):
        alone(whole, accumulate=3)


def test_one_process_has_no_shards(tmp_path):
    with pytest.raises(ValueError, match="shard: got True with 1 process, allowed: several proc"):
        alone(tmp_path / "out", shard=True)
    assert not (tmp_path / "out" / "log.jsonl").exists()


def test_the_options_say_what_decides(tmp_path):
    decisive = json.loads(json.dumps(PretrainOptions(tmp_path).decisive()))
    assert {"optimizer", "schedule", "ema"} <= decisive.keys()
    assert not {"accumulate", "shard", "tracker", "save_minutes"} & decisive.keys()
