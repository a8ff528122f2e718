"""An interrupted and resumed run ends with the same model, bit for bit, as a run without a stop."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from _cut_runs import assert_same, cut_run, final
from finetuning_problems import reviews, run, write_rows

from fastbert.finetuning.finetuning_run import FinetuningRun
from fastbert.training import checkpoints

# An epoch has 6 steps, so that steps 4 and 8 are inside an epoch.
SETTINGS = {"epochs": 2, "batch_size": 8, "save_every": 4, "log_every": 3, "held_out": 0.0}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_rows(tmp_path / "data" / "train.csv", reviews(44, 0))
    write_rows(tmp_path / "data" / "validation.csv", reviews(12, 1))
    return tmp_path / "data"


cut = functools.partial(cut_run, FinetuningRun, run)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("freeze", [False, True])
def test_cuts_anywhere_change_no_bit(classify, data, monkeypatch, tmp_path, precision, freeze):
    settings = {**SETTINGS, "precision": precision, "freeze": freeze}
    whole, _ = run(classify(data, output=tmp_path / "whole", **settings))
    assert whole.steps == 12
    expected = final(tmp_path / "whole")
    for steps in ((2, 5), (7, 11)):
        options = classify(data, output=tmp_path / f"cut{steps[0]}", **settings)
        for step in steps:
            cut(monkeypatch, options, step)
        result, text = run(options)
        last = max(number for number in (4, 6, 8) if number <= steps[-1])
        assert f"resumed after step {last} of 12, from {options.folder}" in text
        assert_same(final(options.folder), expected)
        assert result.figures == whole.figures


def test_a_finished_run_stays_as_it_is(classify, data):
    options = classify(data, **SETTINGS)
    first, _ = run(options)
    expected = final(options.folder)
    again, text = run(options)
    assert "resumed after step 12 of 12" in text
    assert_same(final(options.folder), expected)
    assert again.figures == first.figures
    assert again.metrics.is_file()


def test_a_cut_run_has_no_figures_of_an_earlier_run(classify, data, monkeypatch):
    options = classify(data, **SETTINGS)
    run(options)
    cut(monkeypatch, classify(data, **SETTINGS, overwrite=True), 5)
    assert not (options.folder / "metrics.json").exists()
    assert not (options.folder / "confusion.png").exists()
    result, _ = run(options)
    assert json.loads(result.metrics.read_text(encoding="utf-8"))["steps"] == 12


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"epochs": 3}, "epochs"),
        ({"learning_rate": 1e-3}, "learning_rate"),
        ({"freeze": True}, "freeze"),
        ({"labels": ("place", "animal")}, "labels"),
    ],
)
def test_other_options_are_refused_by_name(classify, data, changes, name):
    run(classify(data, **SETTINGS))
    with pytest.raises(ValueError, match=rf"^{name}: got .*, but the run in .* has .*; allowed:"):
        run(classify(data, **{**SETTINGS, **changes}))


def test_other_data_are_refused(classify, data):
    run(classify(data, **SETTINGS))
    write_rows(data / "train.csv", reviews(44, 7))
    with pytest.raises(ValueError, match="examples of the data, by their SHA-256: got"):
        run(classify(data, **SETTINGS))


def test_a_model_that_changed_under_its_path_is_refused(classify, data, pretrained, tmp_path):
    model = Path(shutil.copytree(pretrained, tmp_path / "model"))
    first, _ = run(classify(data, model=model, **SETTINGS))
    path = model / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    name = "bert.embeddings.word_embeddings.weight"
    safetensors.torch.save_file({**weights, name: weights[name] + 1}, path, {"format": "pt"})
    kept = first.metrics.read_bytes()
    with pytest.raises(
        ValueError, match=r"^files of the model, by their SHA-256: got '[0-9a-f]{64}'"
    ):
        run(classify(data, model=model, **SETTINGS))
    assert first.metrics.read_bytes() == kept
    run(classify(data, model=model, overwrite=True, **SETTINGS))
    assert first.metrics.read_bytes() != kept


def damage(path: Path) -> None:
    """Change one bit in the middle of the file `path`."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["weights.safetensors", "random.safetensors", "tokenizer.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    classify, data, tmp_path, name
):
    run(classify(data, output=tmp_path / "whole", **SETTINGS))
    options = classify(data, **SETTINGS)
    run(options)
    broken = checkpoints.folder_of(options.folder, 12) / name
    damage(broken)
    _, text = run(options)
    assert f"damaged checkpoint, an earlier one is tried: {broken}: its checksum" in text
    assert "resumed after step 8 of 12" in text
    assert_same(final(options.folder), final(tmp_path / "whole"))


def start(pretrained: Path, data: Path, output: Path, *more: object) -> subprocess.Popen:
    arguments = ("finetune", "classify", pretrained, data, "-o", output, "--batch-size", 4)
    command = (sys.executable, "-m", "fastbert", *map(str, (*arguments, "--log-every", 1, *more)))
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "500"},
    )


def wait_for_steps(process: subprocess.Popen, log: Path, steps: int) -> None:
    deadline = time.monotonic() + 300
    while not log.exists() or log.read_bytes().count(b"\n") < steps:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.every_case
def test_a_killed_process_is_resumed_by_the_same_command(pretrained, data, tmp_path):
    more = ("--epochs", 8, "--save-every", 10, "--held-out", 0)
    whole = start(pretrained, data, tmp_path / "whole", *more)
    assert whole.wait(timeout=300) == 0, whole.stdout.read()
    output = tmp_path / "out"
    process = start(pretrained, data, output, *more)
    wait_for_steps(process, output / "log.jsonl", 15)
    process.kill()
    process.communicate(timeout=300)
    assert not (output / "metrics.json").exists()
    second = start(pretrained, data, output, *more)
    text = second.communicate(timeout=300)[0]
    assert second.returncode == 0, text
    assert "resumed after step " in text
    assert_same(final(output), final(tmp_path / "whole"))
    # The killed run and the uninterrupted run choose the same best epoch.
    kept = [
        json.loads((folder / "metrics.json").read_text()) for folder in (output, tmp_path / "whole")
    ]
    assert kept[0]["best"] == kept[1]["best"]
    assert kept[0]["kept"] == kept[1]["kept"]


def test_a_signal_ends_the_run_with_a_checkpoint_and_its_status(pretrained, data, tmp_path):
    output = tmp_path / "out"
    process = start(pretrained, data, output, "--epochs", 100_000)
    wait_for_steps(process, output / "log.jsonl", 3)
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=300)[0]
    assert process.returncode == 128 + signal.SIGTERM, text
    assert "Traceback" not in text
    step = checkpoints.newest(output, pytest.fail).content["step"]
    kept = "kept: log.jsonl, curves.png, the checkpoint of st"
    assert f"stopped by SIGTERM after step {step} of 1100000; {kept}" in text
    assert {path.name for path in output.iterdir()} == {
        *("model", "checkpoints", "log.jsonl", "curves.png"),
    }


@pytest.mark.parametrize("bf16", [False, True])
def test_a_loss_that_is_not_finite_changes_no_weight_and_names_the_batch(
    classify, data, monkeypatch, bf16
):
    options = classify(data, **SETTINGS, precision="bf16" if bf16 else "fp32")
    original = FinetuningRun.update
    weights: dict[str, torch.Tensor] = {}

    def update(self, features):
        if self.step == 7:
            # Infinite logits make the loss infinite.
            with torch.no_grad():
                self.model.classifier.bias.fill_(float("inf"))
            weights.update(checkpoints.weights_of(self.model))
            weights.update({n: t.clone() for n, t in weights.items()})
        try:
            return original(self, features)
        finally:
            if self.step == 7:
                after = checkpoints.weights_of(self.model)
                assert all(torch.equal(after[name], weights[name]) for name in weights)

    monkeypatch.setattr(FinetuningRun, "update", update)
    with pytest.raises(RuntimeError) as failure:
        run(options)
    text = str(failure.value)
    assert "the loss or the gradient of batch 1 of epoch 1 is not finite at step 8: " in text
    assert text.count(f"{data / 'train.csv'}, line ") == 8
    assert weights
    assert checkpoints.newest(options.folder, pytest.fail).content["step"] == 6


def test_an_infinite_loss_with_a_finite_gradient_stops_the_run(classify, data, monkeypatch):
    options = classify(data, **SETTINGS)
    forward = torch.nn.Module.__call__

    def infinite(self, *arguments, **named):
        output = forward(self, *arguments, **named)
        if "labels" in named and self.training:
            output.loss = output.loss + float("inf") * (torch.rand(()) > 2).logical_not()
        return output

    monkeypatch.setattr(torch.nn.Module, "__call__", infinite)
    with pytest.raises(RuntimeError, match="batch 0 of epoch 0 is not finite at step 1"):
        run(options)
    assert not checkpoints.exists(options.folder)


def test_checkpoints_are_written_by_time(classify, data):
    changes = {"epochs": 1, "save_every": None, "save_minutes": 1e-9, "keep_checkpoints": 20}
    options = classify(data, **{**SETTINGS, **changes})
    run(options)
    kept = sorted(int(path.name[5:]) for path in (options.folder / "checkpoints").iterdir())
    assert kept == [1, 2, 3, 4, 5, 6]
