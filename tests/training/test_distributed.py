"""Two processes of torchrun write one log and one checkpoint, and have the same weights."""

import json
import os
import subprocess
import sys

import safetensors.torch
import torch

SCRIPT = """
import os
import sys
from pathlib import Path
import torch
from fastbert.data import stories
from fastbert.training import PretrainOptions, pretrain

torch.set_num_threads(1)
options = PretrainOptions(
    output=sys.argv[1], preset="tiny", config={"hidden_size": 32, "intermediate_size": 64},
    vocab_size=300, max_length=48, tokens_per_batch=384, steps=4, log_every=2, held_out=0.2,
)
result = pretrain(options, documents=list(stories(40, 0)))
Path(sys.argv[1] + os.environ["RANK"]).write_text(str(result.evaluation))
"""

STOPPED = """
import os
import signal
from fastbert.training import loop, pretraining

step = pretraining.PretrainingRun.train_step

def signalled(self, batch):
    if self.step == 1 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return step(self, batch)

pretraining.PretrainingRun.train_step = signalled
pretrain = loop.pretrain
def told(*arguments, **options):
    try:
        return pretrain(*arguments, **options)
    except SystemExit as error:
        Path(sys.argv[1] + os.environ["RANK"]).write_text(str(error.code))
        raise SystemExit(0)
"""


# Both processes die at the beginning of the third step.
KILLED = """
import os
from fastbert.training import loop, pretraining

step = pretraining.PretrainingRun.train_step

def killed(self, batch):
    if self.step == 2:
        os._exit(9)
    return step(self, batch)

pretraining.PretrainingRun.train_step = killed
"""


def torchrun(tmp_path, source):
    script = tmp_path / "script.py"
    script.write_text(source)
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
            *(str(script), str(tmp_path / "out")),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_signal_to_one_process_stops_both_after_the_same_step(tmp_path):
    source = SCRIPT.replace("torch.set", f"{STOPPED}\ntorch.set").replace(" pretrain(o", " told(o")
    done = torchrun(tmp_path, source)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "stopped by SIGTERM after step 2 of 4; kept: " in done.stdout
    assert "the checkpoint of step 2" in done.stdout
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    assert [(tmp_path / f"out{rank}").read_text() for rank in (0, 1)] == ["143", "143"]


def test_two_processes_train_one_model(tmp_path):
    done = torchrun(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [(row["event"], row["step"]) for row in rows] == [
        ("train", 2),
        ("train", 4),
        ("evaluation", 4),
    ]
    assert done.stdout.count("2 process(es)") == 1
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    # Both processes have the same weights; otherwise their evaluations would differ.
    assert (tmp_path / "out0").read_text() == (tmp_path / "out1").read_text()


def test_two_processes_that_died_resume_to_the_same_bits(tmp_path):
    source = SCRIPT.replace("steps=4", "steps=4, save_every=2")
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    done = torchrun(tmp_path / "whole", source)
    assert done.returncode == 0, done.stderr[-3000:]
    died = torchrun(tmp_path / "cut", source.replace("torch.set", f"{KILLED}\ntorch.set"))
    assert died.returncode != 0
    done = torchrun(tmp_path / "cut", source)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed after step 2 of 4" in done.stdout
    folders = [
        tmp_path / name / "out" / "checkpoints" / "step-00000004" for name in ("whole", "cut")
    ]
    for part in ("weights", "optimizer", "processes"):
        whole, cut = (safetensors.torch.load_file(f / f"{part}.safetensors") for f in folders)
        assert whole.keys() == cut.keys()
        assert all(torch.equal(tensor, cut[name]) for name, tensor in whole.items())
    # One process cannot continue the run of two.
    alone = subprocess.run(
        [sys.executable, str(tmp_path / "cut" / "script.py"), str(tmp_path / "cut" / "out")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RANK": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert alone.returncode != 0
    assert "processes × accumulate: got 1, but the run in" in alone.stderr
