"""The model of the best epoch is saved, and a run stops after epochs without improvement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from finetuning_problems import reviews, run, write_rows

from fastbert.finetuning.finetuning_run import FinetuningRun
from fastbert.finetuning.task import Judgement
from fastbert.modules import BertForSequenceClassification
from fastbert.training import checkpoints
from fastbert.training.log import read_log

# The evaluations of a run report these accuracies, in this order.
ACCURACIES = (0.5, 0.625, 0.75, 0.75, 0.5, 0.625, 0.875, 0.5)
SETTINGS = {"epochs": 8, "batch_size": 8, "log_every": 3, "save_every": 4, "keep_checkpoints": 50}
STEPS_PER_EPOCH = 6


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_rows(tmp_path / "data" / "train.csv", reviews(44, 0))
    write_rows(tmp_path / "data" / "validation.csv", reviews(12, 1))
    return tmp_path / "data"


@pytest.fixture
def scripted(monkeypatch):
    """Make the evaluations during the training report `ACCURACIES`, one after another."""
    original, evaluate = FinetuningRun.judge, FinetuningRun.evaluate

    def given(self, name):
        judgement = original(self, name)
        accuracy = ACCURACIES[
            (self.step + 1) // (self.options.eval_every or self.steps_per_epoch) - 1
        ]
        return Judgement({**judgement.figures, "accuracy": accuracy}, judgement.confusion)

    def evaluated(self, record):
        with monkeypatch.context() as patch:
            patch.setattr(FinetuningRun, "judge", given)
            evaluate(self, record)

    monkeypatch.setattr(FinetuningRun, "evaluate", evaluated)


def cut(monkeypatch, options, step):
    """Interrupt a run at the beginning of `step`; the first step is 0."""
    original = FinetuningRun.update

    def update(self, features):
        if self.step == step:
            raise KeyboardInterrupt
        return original(self, features)

    with monkeypatch.context() as patch:
        patch.setattr(FinetuningRun, "update", update)
        with pytest.raises(KeyboardInterrupt):
            run(options)


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoints.weights_of(BertForSequenceClassification.from_pretrained(folder / "model"))


def weights_after(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoints.read(checkpoints.folder_of(folder, step)).tensors("weights")


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert actual.keys() == expected.keys()
    return all(torch.equal(actual[name], expected[name]) for name in expected)


def test_the_model_of_the_best_epoch_is_kept_and_judged(scripted, classify, data, tmp_path):
    best, text = run(classify(data, output=tmp_path / "best", **SETTINGS))
    last, other = run(classify(data, output=tmp_path / "last", keep_epoch="last", **SETTINGS))
    assert same(model_of(tmp_path / "best"), weights_after(tmp_path / "best", 42))
    assert same(model_of(tmp_path / "last"), weights_after(tmp_path / "last", 48))
    assert not same(model_of(tmp_path / "best"), model_of(tmp_path / "last"))
    # The option keep_epoch changes no training step, so the checkpoints are equal.
    for step in (6, 48):
        assert same(weights_after(tmp_path / "best", step), weights_after(tmp_path / "last", step))
    told = {"figure": "accuracy", "value": 0.875, "epoch": 7, "step": 42}
    assert best.best == last.best == told
    assert "kept: the model after epoch 7 of 8 (step 42), the best by accuracy, 0.875" in text
    assert "kept: the model after epoch 8 of 8 (step 48), the last; the best by accuracy" in other
    content = json.loads(best.metrics.read_text(encoding="utf-8"))
    assert content["best"] == told
    assert content["kept"] == {"epoch": 7, "step": 42}
    # A run whose learning rate changes no weight must give the same figures for all parts.
    again, _ = run(
        classify(data, model=best.model, epochs=1, learning_rate=1e-30, output=tmp_path / "again")
    )
    assert again.figures["validation"]["loss"] == pytest.approx(
        best.figures["validation"]["loss"], rel=1e-6
    )
    assert best.figures["validation"]["loss"] != last.figures["validation"]["loss"]


def test_patience_stops_the_run(scripted, classify, data, tmp_path):
    options = classify(data, patience=3, **SETTINGS)
    result, text = run(options)
    # Epochs 4, 5 and 6 are no better than epoch 3.
    assert result.steps == 36
    assert result.stopped_early
    assert "stopped early after epoch 6: 3 evaluations without a better accuracy" in text
    assert same(model_of(options.folder), weights_after(options.folder, 18))
    rows = read_log(result.log)
    evaluations = [row for row in rows if row["event"] == "evaluation"]
    assert [row["best"] for row in evaluations] == [True, True, True, False, False, False]
    assert rows[-1] == {"event": "stop", "step": 36, "patience": 3}
    again, text = run(options)
    assert "resumed after step 36 of 48" in text
    assert (again.steps, again.best, again.stopped_early) == (36, result.best, True)
    assert again.figures == result.figures


@pytest.mark.each_value
@pytest.mark.parametrize("keep", ["best", "last"])
@pytest.mark.parametrize("eval_every", [None, 4])
def test_cuts_anywhere_change_no_bit(
    scripted, classify, data, monkeypatch, tmp_path, keep, eval_every
):
    settings = {**SETTINGS, "save_every": 5, "patience": 3, "keep_epoch": keep}
    settings["eval_every"] = eval_every
    whole, _ = run(classify(data, output=tmp_path / "whole", **settings))
    assert whole.steps == 6 * (eval_every or STEPS_PER_EPOCH)
    for steps in ((3, 13), (19, 23), (21,)):
        options = classify(data, output=tmp_path / f"cut{steps[0]}", **settings)
        for step in steps:
            cut(monkeypatch, options, step)
        result, text = run(options)
        assert "resumed after step" in text
        assert same(model_of(options.folder), model_of(tmp_path / "whole"))
        assert (result.best, result.steps) == (whole.best, whole.steps)
        assert result.figures == whole.figures
        last = checkpoints.newest(options.folder, pytest.fail)
        for name in ("weights", "optimizer", "random"):
            expected = checkpoints.newest(tmp_path / "whole", pytest.fail).tensors(name)
            assert same(last.tensors(name), expected)
        rows = [read_log(folder / "log.jsonl") for folder in (options.folder, tmp_path / "whole")]
        assert len(rows[0]) == len(rows[1])


def test_an_interrupted_run_leaves_the_best_model_so_far(
    scripted, classify, data, monkeypatch, tmp_path
):
    options = classify(data, **{**SETTINGS, "save_every": 2})
    cut(monkeypatch, options, 33)
    # The last checkpoint is from step 32, but the saved model is the best model, from step 18.
    assert checkpoints.newest(options.folder, pytest.fail).content["step"] == 32
    assert same(model_of(options.folder), weights_after(options.folder, 18))


def test_without_a_validation_part_the_last_epoch_is_kept_and_told(classify, data):
    options = classify(data / "train.csv", held_out=0.0, epochs=2)
    result, text = run(options)
    assert result.best is None
    assert "kept: the model after epoch 2 of 2 (step 12), the last; no validation part" in text


@pytest.mark.parametrize(("name", "value"), [("patience", 2), ("eval_every", 3)])
def test_an_option_that_needs_a_validation_part_is_refused_without_one(
    classify, data, tmp_path, name, value
):
    options = classify(data / "train.csv", held_out=0.0, **{name: value})
    with pytest.raises(ValueError, match=rf"^{name}: got {value}, allowed: None without a valid"):
        run(options)
    assert not options.folder.exists()


def test_a_checkpoint_without_the_weights_of_its_best_epoch_is_refused(
    scripted, classify, data, tmp_path
):
    options = classify(data, **{**SETTINGS, "keep_checkpoints": 1})
    run(options)
    path = checkpoints.folder_of(options.folder, 48) / "best.safetensors"
    path.unlink()
    with pytest.raises(ValueError, match=r"all checkpoints of .* are damaged"):
        run(options)


def test_a_run_before_these_options_is_resumed_with_the_last_epoch(
    scripted, classify, data, monkeypatch
):
    options = classify(data, keep_epoch="last", **SETTINGS)
    cut(monkeypatch, options, 9)
    folder = checkpoints.newest(options.folder, pytest.fail).folder
    content = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    for name in ("keep_epoch", "patience", "eval_every"):
        del content["options"][name]
    del content["best"], content["checksum"]
    content["checksum"] = checkpoints._checksum_of(content)
    (folder / "state.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"^keep_epoch: got 'best', but the run in .* has 'last'"):
        run(classify(data, **SETTINGS))
    _, text = run(options)
    assert "resumed after step 8 of 48" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patience": 0}, "patience: got 0, allowed: None or an integer >= 1"),
        ({"eval_every": 0}, "eval_every: got 0, allowed: None or an integer >= 1"),
        ({"keep_epoch": "first"}, "keep_epoch: got 'first', allowed: best, last"),
    ],
)
def test_a_wrong_option_is_named(classify, data, changes, message):
    with pytest.raises(ValueError, match=message):
        classify(data, **changes)


def test_curves_mark_the_best_epoch_and_the_stop(drawn, scripted, classify, data, monkeypatch):
    from matplotlib.axes import Axes

    lines = []
    original = Axes.axvline
    monkeypatch.setattr(
        Axes, "axvline", lambda *a, **k: (lines.append((a[1], k["label"])), original(*a, **k))[1]
    )
    run(classify(data, patience=3, **SETTINGS))
    assert lines == [(18, "best (step 18)"), (36, "stopped early (step 36)")] * 2


def test_a_stop_inside_an_epoch_has_a_checkpoint(scripted, classify, data):
    options = classify(data, eval_every=4, patience=2, **{**SETTINGS, "save_every": 7})
    result, text = run(options)
    assert result.steps == 20
    assert "stopped early in epoch 4: 2 evaluations without a better accuracy" in text
    assert "kept: the model in epoch 2 of 8 (step 12), the best by accuracy, 0.75" in text
    assert checkpoints.newest(options.folder, pytest.fail).content["step"] == 20
    assert "resumed after step 20 of 48" in run(options)[1]
