"""A training run that is killed during a save leaves the new checkpoint or the previous one."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time

import pytest
import torch
from killing import child, end_of
from quick_cases import long_case

from fastbert.data import stories, train_tokenizer
from fastbert.training import checkpoints

KEEP = 2


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(list(stories(20, 0)), 200)


def tensors_of(step):
    return {name: {"x": torch.full((500,), float(step))} for name in ("weights", "optimizer")}


@pytest.mark.every_case
@pytest.mark.parametrize("kills", [20, long_case(200)], ids=["20", "200"])
def test_kills_at_random_moments(tmp_path, tokenizer, kills):
    random.seed(kills)
    reader, writer = os.pipe()
    reached = 0

    def save_on():
        for step in itertools.count(reached + 1):
            content = {"epoch": step, "seconds": 0.0, "before": 0.0, "options": {}}
            checkpoints.save(tmp_path, step, content, tensors_of(step), tokenizer, KEEP)
            os.write(writer, step.to_bytes(8, "little"))

    midst = 0
    for _ in range(kills):
        number = child(save_on)
        # The first message comes after the first save, so a checkpoint exists at every kill.
        told = os.read(reader, 8)
        time.sleep(random.uniform(0, 0.03))
        os.kill(number, signal.SIGKILL)
        assert end_of(number) == -signal.SIGKILL
        os.set_blocking(reader, False)
        while True:
            try:
                told = os.read(reader, 8)
            except BlockingIOError:
                break
        os.set_blocking(reader, True)
        saved = int.from_bytes(told, "little")
        midst += any(path.name.startswith(".") for path in (tmp_path / "checkpoints").iterdir())
        checkpoint = checkpoints.newest(tmp_path, pytest.fail)
        reached = checkpoint.content["step"]
        # After a kill between the rename and the message, there is one more step than was reported.
        assert reached in (saved, saved + 1)
        for name, expected in tensors_of(reached).items():
            assert torch.equal(checkpoint.tensors(name)["x"], expected["x"])
        assert checkpoint.tokenizer().vocab_size == tokenizer.vocab_size
    os.close(reader)
    os.close(writer)
    assert midst > kills // 4, "too few kills fell into a save"
