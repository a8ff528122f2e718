"""Two processes train like one process, and one process continues their run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from seq2seq_problems import SIZES, SMALL, write_pairs

from fastbert.training.log import read_log

# Three processes import torch one after another.
pytestmark = pytest.mark.every_case
LAUNCHERS = {
    1: (sys.executable,),
    2: (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
}


def test_two_processes_train_like_one(tmp_path):
    pairs = write_pairs(tmp_path / "pairs.tsv", "abcd")
    config = [f"--config={name}={value}" for name, value in (SIZES | {"dropout": 0.0}).items()]
    options = ("--merges", 0, "--held-out", SMALL["held_out"], "--epochs", 2, "--log-every", 1)
    # 51 pairs in batches of 10: the last step of an epoch has one pair, for one of two processes.
    command = ("-m", "fastbert", "seq2seq", "train", "--pairs", pairs, "--batch-size", 10, "--json")

    def train(processes: int, folder: str) -> tuple[dict, str]:
        arguments = (*LAUNCHERS[processes], *command, *options, *config, "-o", tmp_path / folder)
        result = subprocess.run(
            list(map(str, arguments)),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            encoding="utf-8",
            timeout=300,
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout), result.stderr

    alone, _ = train(1, "alone")
    together, text = train(2, "together")
    assert "12 steps of 10 pairs in 2 epochs on 2 process(es)" in text
    assert together["figures"] == pytest.approx(alone["figures"], rel=1e-4)
    assert [row["output"] for row in together["examples"]] == [
        row["output"] for row in alone["examples"]
    ]
    rows = [read_log(tmp_path / name / "log.jsonl") for name in ("alone", "together")]
    losses, others = ([row["loss"] for row in of_run] for of_run in rows)
    assert len(losses) == 14
    assert others == pytest.approx(losses, rel=1e-4)
    again, text = train(1, "together")
    assert "resumed after step 12 of 12" in text
    assert "the checkpoint is of 2 process(es), so dropout draws other masks" in text
    assert again["figures"] == together["figures"]
