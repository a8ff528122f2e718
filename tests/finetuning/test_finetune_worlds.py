"""Two processes fine-tune like one process: same losses, each example once, and they resume."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from finetuning_problems import reviews, run, write_rows

from fastbert.finetuning import ClassifyOptions, TagOptions
from fastbert.finetuning.finetuning_run import FinetuningRun
from fastbert.io import safetensors_file
from fastbert.training import checkpoints
from fastbert.training.log import read_log

# 43 sequences make 7 steps per epoch; the last step has one sequence, so one process has none.
SETTINGS: dict[str, Any] = {"epochs": 2, "batch_size": 7, "log_every": 1, "learning_rate": 3e-3}
# The first argument lists jobs, whose runs are made in order. A process records the examples of
# each step. Before each step in `cuts`, all processes stop the run, and then resume it.
SCRIPT = """
import io, json, os, sys
import torch
from rich.console import Console
from fastbert.finetuning import ClassifyOptions, TagOptions, finetune
from fastbert.finetuning.finetuning_run import FinetuningRun

torch.set_num_threads(1)
update = FinetuningRun.update

def noting(self, features):
    if self.step == cut:
        raise KeyboardInterrupt
    collate = self.judging.collate
    def share(own):
        index, processes = self.accelerator.process_index, self.accelerator.num_processes
        weight = len(features[index::processes])
        seen.append([self.step, [feature["example"] for feature in own][:weight]])
        return collate(own)
    self.judging.collate = share
    try:
        return update(self, features)
    finally:
        del self.judging.collate

FinetuningRun.update = noting
for job in json.loads(sys.argv[1]):
    kind = {"classify": ClassifyOptions, "tag": TagOptions}[job["task"]]
    for cut in (*job["cuts"], None):
        seen, console = [], Console(file=io.StringIO(), width=500)
        try:
            result = finetune(kind(**job["options"]), console=console)
        except KeyboardInterrupt:
            continue
    with open(f"{job['options']['output']}.{os.environ['RANK']}.json", "w") as file:
        text = console.file.getvalue()
        json.dump({"seen": seen, "figures": result.figures, "text": text}, file)
"""


# The runs of two processes take about a minute.
pytestmark = pytest.mark.every_case
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
ACCELERATE = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", 2),
    *("--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no"),
    *("--main_process_port", 0),
)


def launch(launcher: tuple[object, ...], tmp_path: Path, jobs: list[dict[str, Any]]) -> None:
    """Make the runs of `jobs` in two processes, one run after another."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    finished = subprocess.run(
        [sys.executable, *map(str, (*launcher, script)), json.dumps(jobs, default=str)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert finished.returncode == 0, finished.stdout[-3000:]


@pytest.fixture(scope="module")
def without_dropout(pretrained, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("without") / "model"
    shutil.copytree(pretrained, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    """Return each task's folder of data, whose test part needs several evaluation batches."""
    folder, counts = tmp_path_factory.mktemp("data"), {"train": 43, "validation": 12, "test": 1501}
    for seed, (part, count) in enumerate(counts.items()):
        rows = reviews(count, seed)
        write_rows(folder / "classify" / f"{part}.csv", rows)
        tagged = [
            {"tokens": words, "tags": [row["label"], *["other"] * (len(words) - 1)]}
            for row in rows
            for words in [row["text"].split()]
        ]
        write_rows(folder / "tag" / f"{part}.jsonl", tagged)
    return {task: folder / task for task in ("classify", "tag")}


def job(task: str, output: Path, cuts: tuple[int, ...] = (), **options: Any) -> dict[str, Any]:
    return {"task": task, "cuts": cuts, "options": {**SETTINGS, "output": output, **options}}


@pytest.fixture(scope="module")
def runs(without_dropout, pretrained, data, tmp_path_factory) -> Path:
    """Return the folder of all runs: in two processes, and in one process for comparison."""
    folder = tmp_path_factory.mktemp("runs")
    jobs = []
    for task, kind in (("classify", ClassifyOptions), ("tag", TagOptions)):
        options = {"model": without_dropout, "data": data[task]}
        run(kind(**{**SETTINGS, **options, "output": folder / f"{task}-alone"}))
        jobs.append(job(task, folder / task, **options))
    # Two processes continue a run of one process after step 7. With dropout, they make an
    # uninterrupted run, and a run that is interrupted twice.
    shutil.copytree(folder / "classify-alone", folder / "taken-over")
    shutil.rmtree(checkpoints.folder_of(folder / "taken-over", 14))
    options = {"model": without_dropout, "data": data["classify"]}
    jobs.append(job("classify", folder / "taken-over", **options))
    options["model"] = pretrained
    for name, cuts in (("whole", ()), ("cut", (2, 9))):
        jobs.append(job("classify", folder / name, cuts, save_every=3, **options))
    launch(TORCHRUN, folder, jobs)
    return folder


def told(runs: Path, name: str) -> list[dict[str, Any]]:
    return [
        json.loads((runs / f"{name}.{rank}.json").read_text(encoding="utf-8")) for rank in range(2)
    ]


def rows(folder: Path) -> list[dict[str, Any]]:
    times = ("tokens_per_second",)
    return [
        {name: value for name, value in row.items() if name not in times}
        for row in read_log(folder / "log.jsonl")
    ]


def learned(checkpoint: checkpoints.Checkpoint) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint except the biases of the keys.

    The softmax does not depend on these biases. Their gradient is only rounding error, which Adam
    scales up to full steps.
    """
    weights = checkpoint.tensors("weights")
    for name in [name for name in weights if name.endswith("qkv.bias")]:
        query, _, value = weights.pop(name).chunk(3)
        weights |= {f"{name}.query": query, f"{name}.value": value}
    return weights


def assert_close(folder: Path, alone: Path) -> None:
    """Compare the log and the last checkpoint with those of a run in one process."""
    curve, expected = rows(folder), rows(alone)
    assert [row["event"] for row in curve].count("evaluation") == 2
    assert torch.tensor([r["loss"] for r in expected]).std() > 1e-2
    for row, other in zip(curve, expected, strict=True):
        assert row.keys() == other.keys()
        for key in ("step", "loss", "gradient_norm", "learning_rate"):
            if key in row:
                assert row[key] == pytest.approx(other[key], rel=1e-4), (row["step"], key)
    checkpoint, whole = (checkpoints.newest(output, pytest.fail) for output in (folder, alone))
    assert checkpoint.content["step"] == whole.content["step"] == 14
    torch.testing.assert_close(learned(checkpoint), learned(whole), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", ["classify", "tag", "taken-over"])
def test_two_processes_have_the_curve_and_the_weights_of_one(runs, name):
    assert_close(runs / name, runs / f"{'classify' if name == 'taken-over' else name}-alone")
    text = told(runs, name)[0]["text"]
    assert "14 steps of 7 sequences in 2 epochs on 2 process(es)" in text
    taken_over = "the checkpoint is of 1 process(es), so dropout draws other masks" in text
    assert taken_over == (name == "taken-over") == ("resumed after step 7 of 14" in text)


def test_accelerate_launch_starts_two_processes_and_one_continues_them(
    runs, without_dropout, data, tmp_path
):
    options = {"model": without_dropout, "data": data["classify"]}
    launch(ACCELERATE, tmp_path, [job("classify", tmp_path / "out", **options)])
    first, second = told(tmp_path, "out")
    assert "14 steps of 7 sequences in 2 epochs on 2 process(es)" in first["text"]
    assert second["text"] == ""
    assert_close(tmp_path / "out", runs / "classify-alone")
    # In one process, the run that two processes started continues after step 7.
    shutil.rmtree(checkpoints.folder_of(tmp_path / "out", 14))
    _, text = run(ClassifyOptions(**{**SETTINGS, **options, "output": tmp_path / "out"}))
    assert "resumed after step 7 of 14" in text
    assert "the checkpoint is of 2 process(es), so dropout draws other masks" in text
    assert_close(tmp_path / "out", runs / "classify-alone")


def test_the_processes_see_each_example_once_per_epoch(runs):
    seen = [told(runs, "classify")[rank]["seen"] for rank in range(2)]
    assert [step for step, _ in seen[0]] == [step for step, _ in seen[1]] == list(range(14))
    for first in (0, 7):
        examples = Counter(
            number for own in seen for _, numbers in own[first : first + 7] for number in numbers
        )
        assert examples == Counter(range(43))
    # The last batch of an epoch has one sequence, so the second process has none.
    assert [[len(numbers) for _, numbers in own] for own in seen] == [
        [4, 4, 4, 4, 4, 4, 1] * 2,
        [3, 3, 3, 3, 3, 3, 0] * 2,
    ]


@pytest.mark.parametrize("name", ["classify", "tag"])
def test_the_figures_of_all_parts_are_those_of_one_process(runs, name):
    """The loss over the 1,501 test examples is right, so each example counts exactly once."""
    first, second = told(runs, name)
    assert first["figures"] == second["figures"]
    alone = json.loads((runs / f"{name}-alone" / "metrics.json").read_text(encoding="utf-8"))[
        "parts"
    ]
    assert (
        json.loads((runs / name / "metrics.json").read_text(encoding="utf-8"))["parts"]
        == first["figures"]
    )
    for part, figures in alone.items():
        assert first["figures"][part]["examples"] == figures["examples"]
        assert first["figures"][part]["accuracy"] == pytest.approx(figures["accuracy"], abs=2e-3)
        assert first["figures"][part]["loss"] == pytest.approx(figures["loss"], rel=1e-4)


def test_cuts_of_two_processes_change_no_bit(runs):
    actual, expected = (checkpoints.newest(runs / name, pytest.fail) for name in ("cut", "whole"))
    assert actual.content["processes"] == 2
    for part in ("weights", "optimizer", "random"):
        tensors, others = actual.tensors(part), expected.tensors(part)
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensors[name], others[name]) for name in tensors), part
    # Each process draws its own dropout masks.
    assert not torch.equal(*actual.tensors("random")["cpu"])
    models = [safetensors_file.read(runs / n / "model/model.safetensors") for n in ("cut", "whole")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert rows(runs / "cut") == rows(runs / "whole")
    assert told(runs, "cut")[0]["figures"] == told(runs, "whole")[0]["figures"]
    assert "resumed after step 9 of 14" in told(runs, "cut")[0]["text"]
    assert told(runs, "cut")[1]["text"] == ""


def test_a_checkpoint_without_rows_of_processes_is_continued(
    runs, without_dropout, data, tmp_path, monkeypatch
):
    """A run continues from a checkpoint of an earlier release, which has one random state only."""
    options = {"model": without_dropout, "data": data["classify"], "output": tmp_path / "out"}
    original = FinetuningRun.tensors, FinetuningRun.content

    def tensors(self):
        state = original[0](self)
        losses = state["random"]["losses"]
        return {**state, "random": {"cpu": state["random"]["cpu"][0], "losses": losses}}

    def content(self):
        return {k: v for k, v in original[1](self).items() if k != "processes"}

    monkeypatch.setattr(FinetuningRun, "tensors", tensors)
    monkeypatch.setattr(FinetuningRun, "content", content)
    run(ClassifyOptions(**{**SETTINGS, **options}))
    monkeypatch.undo()
    shutil.rmtree(checkpoints.folder_of(tmp_path / "out", 14))
    _, text = run(ClassifyOptions(**{**SETTINGS, **options}))
    assert "resumed after step 7 of 14" in text
    assert "other masks" not in text
    checkpoint, whole = (
        checkpoints.newest(f, pytest.fail) for f in (tmp_path / "out", runs / "classify-alone")
    )
    for name, tensor in whole.tensors("weights").items():
        assert torch.equal(checkpoint.tensors("weights")[name], tensor)
