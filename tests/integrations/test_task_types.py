"""ERNIE's task types: every token may have one, and their table has a gradient."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from stock_families import (
    assert_gradients_close,
    assert_outputs_close,
    build,
    in_dtype,
    inputs,
    run,
    run_with_gradients,
)

import fastbert
from fastbert import modules
from fastbert.testing.yardstick import run_sides


def batch(padding: str = "right") -> dict[str, Tensor]:
    given = inputs(padding, "ernie")
    generator = torch.Generator().manual_seed(3)
    shape = given["input_ids"].shape
    for name, count in (("token_type_ids", 2), ("task_type_ids", 3)):
        given[name] = torch.randint(count, shape, generator=generator)
    return given


def native(stock: Any, folder: Path) -> modules.BertModel:
    stock.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return modules.BertModel.from_pretrained(folder)


@pytest.mark.parametrize("padding", ["right", "left", "middle"])
@pytest.mark.parametrize("side", ["accelerated", "native"])
def test_outputs(side, padding, tmp_path) -> None:
    stock, given = build("ernie"), batch(padding)
    ours = (
        fastbert.accelerate(copy.deepcopy(stock))
        if side == "accelerated"
        else native(stock, tmp_path)
    )
    mask = given["attention_mask"]
    sides = (ours, in_dtype(stock, torch.float64), stock)
    with torch.no_grad():
        runs = run_sides(lambda side: run(side, given).existing(mask), *sides)
        assert_outputs_close(*runs)
        without = {name: t for name, t in given.items() if name != "task_type_ids"}
        assert not torch.equal(run(ours, without).existing(mask).states, runs[0].states)


@pytest.mark.parametrize("given_types", [True, False])
def test_gradients(given_types) -> None:
    stock, given = build("ernie"), batch()
    if not given_types:
        del given["task_type_ids"]
    ours = fastbert.accelerate(copy.deepcopy(stock))
    sides = (ours, in_dtype(stock, torch.float64), stock)
    runs = run_sides(lambda side: run_with_gradients(side, given)[1], *sides)
    assert "embeddings.task_type_embeddings.weight" in runs[0]
    assert_gradients_close(*runs)


def test_packed_rows_have_task_types(tmp_path) -> None:
    ours, given = native(build("ernie"), tmp_path), batch()
    kept = given.pop("attention_mask").bool()
    ends = torch.tensor([0, *kept.sum(1)]).cumsum(0).int()
    with torch.no_grad():
        padded = ours(**given, attention_mask=kept).last_hidden_state[kept]
        packed = ours(**{name: t[kept] for name, t in given.items()}, cu_seqlens=ends)
    torch.testing.assert_close(packed.last_hidden_state, padded)


def test_bad_task_types(tmp_path) -> None:
    ours, given = native(build("ernie"), tmp_path), batch()
    given["task_type_ids"][1, 2] = 3
    with pytest.raises(ValueError, match=r"^task_type_ids: got 3, allowed: 0 <= task_type_ids < 3"):
        ours(**given)
    given["task_type_ids"] = given["task_type_ids"][:, :4]
    with pytest.raises(ValueError, match=r"^task_type_ids: got shape"):
        ours(**given)
    without = native(build("ernie", use_task_id=False), tmp_path / "without")
    with pytest.raises(ValueError, match=r"^task_type_ids: got a tensor, allowed: None: ernie has"):
        without(**batch())


def test_without_a_table_transformers_ignores_task_types() -> None:
    """Without ``use_task_id``, the accelerated model ignores the argument, as stock does."""
    stock, given = build("ernie", use_task_id=False), batch()
    ours = fastbert.accelerate(copy.deepcopy(stock))
    sides = (ours, in_dtype(stock, torch.float64), stock)
    mask = given["attention_mask"]
    with torch.no_grad():
        assert_outputs_close(*run_sides(lambda side: run(side, given).existing(mask), *sides))
