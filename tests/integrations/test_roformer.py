"""RoFormer rotates with the table of its checkpoint, whatever numbers the table holds."""

from __future__ import annotations

import copy

import pytest
import torch
from stock_families import assert_outputs_close, build, in_dtype, inputs, run

import fastbert
from fastbert.modules.positions import RotaryTable
from fastbert.testing.yardstick import run_sides

pytestmark = pytest.mark.filterwarnings("error:.*runs its own code")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_value", [True, False])
def test_values_are_rotated_if_the_config_says_so(rotary_value, dtype) -> None:
    """In bf16, the table is rounded, and the angles are those of the rounded table."""
    model = in_dtype(build("roformer", rotary_value=rotary_value, embedding_size=144), dtype)
    batch = inputs("middle", "roformer")
    sides = (fastbert.accelerate(copy.deepcopy(model)), in_dtype(model, torch.float64), model)
    with torch.no_grad():
        outs = run_sides(lambda side: run(side, batch).existing(batch["attention_mask"]), *sides)
    assert_outputs_close(*outs)


def test_a_write_to_the_table_is_seen() -> None:
    model, batch = build("roformer"), inputs("right", "roformer")
    fast = fastbert.accelerate(copy.deepcopy(model))
    with torch.no_grad():
        before = fast(**batch).last_hidden_state
        for side in (fast, model):
            side.encoder.embed_positions.weight[1:9] = 0.5
        assert not torch.equal(fast(**batch).last_hidden_state, before)
        sides = (fast, in_dtype(model, torch.float64), model)
        outs = run_sides(lambda side: run(side, batch).existing(batch["attention_mask"]), *sides)
    assert_outputs_close(*outs)


def test_the_table_is_that_of_transformers() -> None:
    table = build("roformer").encoder.embed_positions
    ours = RotaryTable(*table.weight.shape, base=10_000.0)
    torch.testing.assert_close(ours.weight, table.weight)
    assert not ours.weight.requires_grad
