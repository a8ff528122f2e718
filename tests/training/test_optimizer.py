"""The groups for weight decay, and exact values of the schedule."""

import pytest
import torch

from fastbert.config import BertConfig
from fastbert.modules import BertForPreTraining
from fastbert.training.optimizer import decay_groups, make_optimizer
from fastbert.training.schedules import schedule_factor


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


def test_schedule_rises_then_falls_linearly():
    factors = [schedule_factor(step, warmup_steps=4, total_steps=8) for step in range(9)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_schedule_without_warmup_starts_at_the_peak():
    factors = [schedule_factor(step, warmup_steps=0, total_steps=2) for step in range(2)]
    assert factors == [1.0, 0.5]


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
