"""If a process is killed, the job ends with a message, or is restarted and resumes its run.

No job may hang, so every wait has a time limit.
"""

from __future__ import annotations

import socket
import time

import pytest
from pretraining_worlds import SETTINGS, finish, start, torchrun
from quick_cases import long_case
from rich.console import Console

from fastbert.data import stories
from fastbert.training import PretrainOptions, checkpoints, pretrain
from fastbert.training.log import read_log


def steps(folder) -> list[int]:
    return [row["step"] for row in read_log(folder / "log.jsonl") if row["event"] == "train"]


@pytest.mark.every_case
def test_a_killed_process_ends_the_job_with_a_message(tmp_path):
    process = start(tmp_path, torchrun(2), {"save_every": 2}, KILL="0 3")
    text = finish(process)
    assert process.returncode == 1
    assert "Signal 9 (SIGKILL)" in text
    # The checkpoint of step 2 is complete.
    assert checkpoints.newest(tmp_path / "out", pytest.fail).content["step"] == 2


@pytest.mark.parametrize(
    ("processes", "overwrite"),
    [(2, False), (1, True), long_case(2, True)],
)
@pytest.mark.every_case
def test_torchrun_restarts_a_killed_process_and_the_run_resumes(tmp_path, processes, overwrite):
    """With `overwrite`, a run deletes an earlier run, but not checkpoints of earlier attempts."""
    if overwrite:
        earlier = PretrainOptions(tmp_path / "out", **{**SETTINGS, "steps": 5, "save_every": 5})
        pretrain(earlier, documents=list(stories(40, 0)), console=Console(quiet=True))
    started = time.monotonic()
    launcher = torchrun(processes, "--max-restarts", 1)
    changes = {"save_every": 2, "overwrite": overwrite}
    process = start(tmp_path, launcher, changes, KILL=f"{processes - 1} 3")
    text = finish(process)
    assert process.returncode == 0, text[-3000:]
    assert "exitcode: -9" in text
    assert text.count("resumed after step ") == 1
    assert "resumed after step 2 of 6" in text
    assert steps(tmp_path / "out") == [1, 2, 3, 4, 5, 6]
    # The run takes 8 s on two idle cores; the limit leaves time for other work on the machine.
    assert time.monotonic() - started < 120


@pytest.mark.every_case
def test_two_machines_restart_together(tmp_path):
    """Two agents of torchrun on this machine stand for two machines with a shared folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = (
        *("-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"),
        *("--local-addr", "127.0.0.1", "--max-restarts", 1),
    )
    agents = [start(tmp_path, launcher, {"save_every": 2}, KILL="1 3") for _ in range(2)]
    texts = [finish(agent) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(t[-3000:] for t in texts)
    text = "".join(texts)
    assert text.count("6 steps of up to 384 tokens on 2 process(es)") == 2
    assert "resumed after step 2 of 6" in text
    assert steps(tmp_path / "out") == [1, 2, 3, 4, 5, 6]
