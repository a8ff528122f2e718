"""Schedules have exact values, and continue after a number of steps."""

import math

import pytest
import torch

from fastbert.training.schedules import SCHEDULES, continue_schedule, make_schedule, schedule_factor


def factors(shape, *, warmup_steps, total_steps):
    return [
        schedule_factor(step, warmup_steps=warmup_steps, total_steps=total_steps, shape=shape)
        for step in range(total_steps + 1)
    ]


def test_linear_rises_then_falls_linearly():
    rates = factors("linear", warmup_steps=4, total_steps=8)
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_linear_without_warmup_starts_at_the_peak():
    assert factors("linear", warmup_steps=0, total_steps=2) == [1.0, 0.5, 0.0]


def test_cosine_falls_along_half_a_period():
    rates = factors("cosine", warmup_steps=2, total_steps=6)
    root = math.sqrt(0.5)
    expected = [0.5, 1.0, 1.0, (1 + root) / 2, 0.5, (1 - root) / 2, 0.0]
    assert rates == pytest.approx(expected, abs=1e-15)


def test_constant_stays_at_the_peak():
    assert factors("constant", warmup_steps=2, total_steps=4) == [0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("shape", SCHEDULES)
@pytest.mark.parametrize("cut", [1, 3, 7])
def test_a_continued_schedule_has_the_same_rates(shape, cut):
    def start():
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
        return optimizer, make_schedule(optimizer, shape=shape, warmup=0.3, total_steps=10)

    def rates(optimizer, schedule, steps):
        seen_rates = []
        for _ in range(steps):
            seen_rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return seen_rates

    whole = rates(*start(), 10)
    optimizer, schedule = start()
    continue_schedule(schedule, cut)
    assert rates(optimizer, schedule, 10 - cut) == whole[cut:]
