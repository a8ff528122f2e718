"""The moving average of the weights has the right values, is evaluated, and is exported."""

import io

import pytest
import torch
from rich.console import Console

from fastbert.modules import BertForPreTraining
from fastbert.training import checkpoints, pretraining_run
from fastbert.training.average import WeightAverage
from fastbert.training.evaluate import evaluate
from fastbert.training.pretraining import pretrain


def test_the_average_follows_the_weights():
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    average = WeightAverage(model, 0.5)
    expected = 1.0
    for step in range(1, 12):
        with torch.no_grad():
            model.weight.fill_(float(step))
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        assert float(average.tensors()["weight"]) == pytest.approx(expected, rel=1e-6)


def test_the_model_has_the_average_in_a_block_and_its_weights_after_it():
    model = torch.nn.Linear(3, 2)
    average = WeightAverage(model, 0.9)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    trained = model.weight.detach().clone()
    with average.applied():
        assert torch.equal(model.weight, before)
    assert torch.equal(model.weight, trained)
    assert torch.equal(average.tensors()["weight"], before)


def test_a_weight_that_is_not_trained_has_no_average():
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert set(WeightAverage(model, 0.9).tensors()) == {"weight"}


def test_the_average_is_evaluated_and_exported(options, documents, monkeypatch):
    batches = []
    original = pretraining_run.evaluate

    def keep(model, held_out):
        batches.extend(held_out)
        return original(model, held_out)

    monkeypatch.setattr(pretraining_run, "evaluate", keep)
    chosen = options(ema=0.9)
    result = pretrain(chosen, documents=documents, console=Console(file=io.StringIO()))
    newest = checkpoints.newest(chosen.folder, pytest.fail)
    weights, average = newest.tensors("weights"), newest.tensors("average")
    model = BertForPreTraining.from_pretrained(result.checkpoint)
    exported = checkpoints.weights_of(model)
    assert all(torch.equal(exported[name], average[name]) for name in average)
    assert any(not torch.equal(weights[name], average[name]) for name in average)
    assert evaluate(model, batches) == result.evaluation


def test_a_run_with_an_average_has_the_weights_of_a_run_without(options, documents, tmp_path):
    results = []
    for name, ema in (("with", 0.9), ("without", None)):
        chosen = options(output=tmp_path / name, ema=ema, save_every=2, eval_every=2)
        pretrain(chosen, documents=documents, console=Console(quiet=True))
        results.append(checkpoints.newest(chosen.folder, pytest.fail).tensors("weights"))
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())
