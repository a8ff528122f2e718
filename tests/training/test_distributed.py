"""Two processes of torchrun have the same weights, and write one log and one checkpoint."""

import json
import os
import random

import _fresh_python
import pytest
import safetensors.torch
import torch
from quick_cases import long_case

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
from fastbert.training import pretraining, pretraining_run

step = pretraining_run.PretrainingRun.train_step

def signalled(self, batch):
    if self.step == 1 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return step(self, batch)

pretraining_run.PretrainingRun.train_step = signalled
pretrain = pretraining.pretrain
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
from fastbert.training import pretraining, pretraining_run

step = pretraining_run.PretrainingRun.train_step

def killed(self, batch):
    if self.step == 2:
        os._exit(9)
    return step(self, batch)

pretraining_run.PretrainingRun.train_step = killed
"""


def torchrun(tmp_path, source, *more):
    script = tmp_path / "script.py"
    script.write_text(source)
    return _fresh_python.run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
        *(script, tmp_path / "out", *more),
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.mark.every_case
def test_a_signal_to_one_process_stops_both_after_the_same_step(tmp_path):
    source = SCRIPT.replace("torch.set", f"{STOPPED}\ntorch.set").replace(" pretrain(o", " told(o")
    done = torchrun(tmp_path, source)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "stopped by SIGTERM after step 2 of 4; kept: " in done.stdout
    assert "the checkpoint of step 2" in done.stdout
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    assert [(tmp_path / f"out{rank}").read_text(encoding="utf-8") for rank in (0, 1)] == [
        "143",
        "143",
    ]


def test_two_processes_train_one_model(tmp_path):
    done = torchrun(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [
        json.loads(line)
        for line in (tmp_path / "out" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [(row["event"], row["step"]) for row in rows] == [
        ("train", 2),
        ("train", 4),
        ("evaluation", 4),
    ]
    assert done.stdout.count("2 process(es)") == 1
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    # Both processes have the same weights; otherwise their evaluations would differ.
    assert (tmp_path / "out0").read_text(encoding="utf-8") == (tmp_path / "out1").read_text(
        encoding="utf-8"
    )


@pytest.mark.every_case
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


# Both processes make an uninterrupted run, and runs that stop before some steps and are resumed.
CUTS = """
import io
import json
import sys
import torch
from rich.console import Console
from fastbert.data import stories
from fastbert.training import PretrainOptions, pretrain, pretraining_run

torch.set_num_threads(1)
step, documents = pretraining_run.PretrainingRun.train_step, list(stories(40, 0))

def cut(self, batch):
    if self.step == last:
        raise KeyboardInterrupt
    return step(self, batch)

pretraining_run.PretrainingRun.train_step = cut
for number, cuts in enumerate(json.loads(sys.argv[2])):
    options = PretrainOptions(
        output=f"{sys.argv[1]}{number}", preset="tiny",
        config={"hidden_size": 32, "intermediate_size": 64}, vocab_size=300, max_length=48,
        tokens_per_batch=384, steps=10, log_every=2, held_out=0.2, save_every=3, ema=0.95,
    )
    for last in (*cuts, None):
        console = Console(file=io.StringIO(), width=500)
        try:
            pretrain(options, documents=documents, console=console)
        except KeyboardInterrupt:
            continue
    print(console.file.getvalue())
"""


@pytest.mark.parametrize("points", [4, long_case(20)])
@pytest.mark.every_case
def test_cuts_of_two_processes_change_no_bit(tmp_path, points):
    """Runs that stop before two random steps and resume have the bits of an uninterrupted run."""
    draw = random.Random(points)
    pairs = [sorted(draw.sample(range(1, 10), 2)) for _ in range(points // 2)]
    done = torchrun(tmp_path, CUTS, json.dumps([[], *pairs]))
    assert done.returncode == 0, done.stderr[-3000:]
    expected, *actual = (finished(tmp_path / f"out{number}") for number in range(len(pairs) + 1))
    parts = {name.split(" ")[0] for name in expected[0]}
    assert parts == {"weights", "optimizer", "processes", "average", "model"}
    for number, (tensors, rows) in enumerate(actual):
        assert tensors.keys() == expected[0].keys()
        for name, tensor in expected[0].items():
            assert torch.equal(tensors[name], tensor), (pairs[number], name)
        assert rows == expected[1]
    for _, last in pairs:
        if saved := last // 3 * 3:
            assert f"resumed after step {saved} of 10" in done.stdout


def finished(folder):
    """Return the tensors of the last checkpoint and of the model, and the log without times."""
    files = [*sorted((folder / "checkpoints" / "step-00000010").glob("*.safetensors"))]
    tensors = {
        f"{path.stem} {name}": tensor
        for path in (*files, folder / "model" / "model.safetensors")
        for name, tensor in safetensors.torch.load_file(path).items()
    }
    rows = [
        json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return tensors, [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]
