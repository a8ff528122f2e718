"""A second run into the same folder is refused, and the first run ends with unchanged results."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
from rich.console import Console

from fastbert.io import safetensors_file
from fastbert.training import pretraining_run
from fastbert.training.log import read_log
from fastbert.training.pretraining import pretrain


def run(options, documents):
    return pretrain(options, documents=documents, console=Console(file=io.StringIO()))


def results_of(folder):
    rows = [
        {k: v for k, v in row.items() if k != "tokens_per_second"}
        for row in read_log(folder / "log.jsonl")
    ]
    return rows, safetensors_file.read(folder / "model" / "model.safetensors")


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_second_run_is_refused_and_changes_nothing(
    options, documents, monkeypatch, tmp_path, overwrite
) -> None:
    first = options(steps=4, save_every=2)
    second = dataclasses.replace(first, seed=1, overwrite=overwrite)
    alone = dataclasses.replace(first, output=tmp_path / "alone")
    run(alone, documents)
    original, refused = pretraining_run.PretrainingRun.train_step, []

    def train_step(self, batch):
        if self.step in (0, 3) and len(refused) < 2:
            generator = torch.get_rng_state()
            with pytest.raises(ValueError, match=rf"^output: another run is .*{first.folder}, all"):
                run(second, documents)
            torch.set_rng_state(generator)
            refused.append(self.step)
        return original(self, batch)

    monkeypatch.setattr(pretraining_run.PretrainingRun, "train_step", train_step)
    run(first, documents)
    assert refused == [0, 3]
    rows, tensors = results_of(first.folder)
    others, expected = results_of(alone.folder)
    assert rows == others
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    # Once the first run has ended, another run may use the folder.
    run(dataclasses.replace(second, overwrite=True), documents)


def test_a_run_that_is_refused_leaves_no_folder(options, documents) -> None:
    chosen = options(tokens_per_batch=10**9)
    with pytest.raises(ValueError, match=r"allowed: at least one (step|each)"):
        run(dataclasses.replace(chosen, accumulate=10), documents)
    assert not chosen.folder.exists()
