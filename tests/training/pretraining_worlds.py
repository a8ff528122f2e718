"""Start a short pre-training run without dropout in one or several processes, for other tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# The second argument of the script has the options of the run. If the environment variable KILL is
# "RANK STEP", the process of that rank ends with SIGKILL before that step in torchrun's first
# attempt.
SCRIPT = """
import json, os, signal, sys
import torch
from rich.console import Console
from fastbert.data import stories
from fastbert.training import PretrainOptions, pretrain, pretraining_run

torch.set_num_threads(1)
kill = os.environ.get("KILL")
if kill and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
    step = pretraining_run.PretrainingRun.train_step
    def killed(self, batch):
        if [os.environ["RANK"], str(self.step)] == kill.split():
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, batch)
    pretraining_run.PretrainingRun.train_step = killed
options = PretrainOptions(sys.argv[1], **json.loads(sys.argv[2]))
pretrain(options, documents=list(stories(40, 0)), console=Console(width=500))
"""
SETTINGS: dict[str, Any] = {
    "preset": "tiny",
    "config": {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "vocab_size": 300,
    "max_length": 48,
    "tokens_per_batch": 384,
    "steps": 6,
    "log_every": 1,
    "eval_every": 3,
    "held_out": 0.2,
    "learning_rate": 3e-3,
}
# This time limit is in seconds. No run takes so long even on a busy machine, so a longer run hangs.
PATIENCE = 240


def start(
    tmp_path: Path, launcher: tuple[object, ...], changes: dict[str, Any], **environment: str
) -> subprocess.Popen[str]:
    """Start the run with the output folder ``out``.

    Args:
        tmp_path: Parent of the output folder.
        launcher: Arguments of Python before the script, such as ``-m torch.distributed.run``.
        changes: Options that differ from `SETTINGS`.
        environment: Environment variables of the run, in addition to those of this process.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = json.dumps({**SETTINGS, **changes})
    arguments = (*launcher, script, tmp_path / "out", options)
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the end of a run and return its output, but kill a run that hangs."""
    try:
        return process.communicate(timeout=PATIENCE)[0]
    finally:
        process.kill()


def torchrun(processes: int, *more: object) -> tuple[object, ...]:
    """Return the arguments of Python that launch `processes` processes with torchrun."""
    command = ("-m", "torch.distributed.run", "--standalone")
    return (*command, "--nproc-per-node", processes, *more)


def accelerate(processes: int) -> tuple[object, ...]:
    """Return the arguments of Python that launch `processes` processes by ``accelerate launch``."""
    command = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", processes)
    rest = ("--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no")
    return (*command, *rest, "--main_process_port", 0)
