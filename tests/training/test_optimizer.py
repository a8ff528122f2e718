"""Optimizers apply weight decay to the right groups of parameters, and follow their schedule."""

import pytest
import torch

from fastbert.config import BertConfig
from fastbert.modules import BertForPreTraining
from fastbert.training.lamb import Lamb
from fastbert.training.optimizer import decay_groups, make_optimizer


@pytest.fixture(scope="module")
def model():
    return BertForPreTraining(BertConfig.preset("tiny", vocab_size=100))


def test_biases_and_layer_norms_do_not_decay(model):
    decayed, kept = decay_groups(model, 0.01)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.01, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter in decayed["params"]:
        name = names[id(parameter)]
        assert not name.endswith("bias"), name
        assert "layernorm" not in name.lower(), name
    for parameter in kept["params"]:
        name = names[id(parameter)].lower()
        assert name.endswith("bias") or "layernorm" in name, name


def test_every_parameter_is_in_one_group_once(model):
    groups = decay_groups(model, 0.01)
    listed = [id(p) for group in groups for p in group["params"]]
    assert len(listed) == len(set(listed))
    assert set(listed) == {id(p) for p in model.parameters()}


def test_learning_rate_follows_the_schedule(model):
    optimizer, schedule = make_optimizer(
        model, learning_rate=2.0, weight_decay=0.1, warmup=0.5, total_steps=4
    )
    rates = []
    for _ in range(4):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == [1.0, 2.0, 2.0, 1.0]
    assert isinstance(optimizer, torch.optim.AdamW)


def test_lamb_scales_the_updates_of_matrices_only(model):
    optimizer, _ = make_optimizer(
        model, learning_rate=1.0, weight_decay=0.1, warmup=0.0, total_steps=2, kind="lamb"
    )
    assert isinstance(optimizer, Lamb)
    for group in optimizer.param_groups:
        assert {p.ndim >= 2 for p in group["params"]} == {group["adapt"]}
        assert group["weight_decay"] == (0.1 if group["adapt"] else 0.0)


def test_the_shape_of_the_schedule_is_chosen(model):
    _, schedule = make_optimizer(
        model, learning_rate=2.0, weight_decay=0.1, warmup=0.0, total_steps=2, schedule="cosine"
    )
    rates = [2.0 * schedule.lr_lambdas[0](step) for step in range(3)]
    assert rates == pytest.approx([2.0, 1.0, 0.0])
