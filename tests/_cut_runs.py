"""Runs that are interrupted at a step, and the comparison of what two runs leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastbert.io import safetensors_file
from fastbert.training import checkpoints
from fastbert.training.log import read_log


def cut_run(kind, run, monkeypatch, options, step):
    """Interrupt a run at the beginning of `step`; the first step is 0.

    `kind` is the class of the run, and `run` the function that trains with `options`.
    """
    original = kind.update

    def update(self, features):
        if self.step == step:
            raise KeyboardInterrupt
        return original(self, features)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "update", update)
        with pytest.raises(KeyboardInterrupt):
            run(options)


def final(folder: Path):
    """Return all tensors of the last checkpoint and of the model, and the log without times."""
    newest = checkpoints.newest(folder, pytest.fail)
    tensors = {
        f"{part}.{name}": tensor
        for part in ("weights", "optimizer", "random")
        for name, tensor in newest.tensors(part).items()
    }
    tensors |= safetensors_file.read(folder / "model" / "model.safetensors")
    rows = [
        {k: v for k, v in row.items() if k != "tokens_per_second"}
        for row in read_log(folder / "log.jsonl")
    ]
    return tensors, rows


def assert_same(actual, expected):
    assert actual[0].keys() == expected[0].keys()
    for name, tensor in expected[0].items():
        assert torch.equal(actual[0][name], tensor), name
    assert actual[1] == expected[1]
