"""Two processes under torchrun: one log, one checkpoint, and the same weights on both."""

import json
import os
import subprocess
import sys

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


def test_two_processes_train_one_model(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
            *(str(script), str(tmp_path / "out")),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [(row["event"], row["step"]) for row in rows] == [
        ("train", 2),
        ("train", 4),
        ("evaluation", 4),
    ]
    assert done.stdout.count("2 process(es)") == 1
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    # Both processes hold the same weights, or their evaluations would differ.
    assert (tmp_path / "out0").read_text() == (tmp_path / "out1").read_text()
