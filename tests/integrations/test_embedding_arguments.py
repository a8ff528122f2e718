"""Arguments of single families: the task types of ERNIE, and the boxes of LayoutLM."""

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

ARGUMENTS = {"ernie": "task_type_ids", "layoutlm": "bbox"}
TABLES = {
    "ernie": ["task_type_embeddings"],
    "layoutlm": [f"{side}_position_embeddings" for side in "xyhw"],
}
every_family = pytest.mark.parametrize("family", ARGUMENTS)


def batch(family: str, padding: str = "right") -> dict[str, Tensor]:
    """Return ids, a mask, token types, and task types or boxes, of which some are equal."""
    given = inputs(padding, family)
    generator = torch.Generator().manual_seed(3)
    shape = given["input_ids"].shape
    given["token_type_ids"] = torch.randint(2, shape, generator=generator)
    if family == "ernie":
        given["task_type_ids"] = torch.randint(3, shape, generator=generator)
    else:
        first = torch.randint(30, (*shape, 2), generator=generator)
        sizes = torch.randint(30, (*shape, 2), generator=generator)
        given["bbox"] = torch.cat([first, first + sizes], -1)
    return given


def native(stock: Any, folder: Path) -> modules.BertModel:
    stock.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return modules.BertModel.from_pretrained(folder)


@pytest.mark.parametrize("padding", ["right", "left", "middle"])
@pytest.mark.parametrize("side", ["accelerated", "native"])
@every_family
def test_outputs(family, side, padding, tmp_path) -> None:
    stock, given = build(family), batch(family, padding)
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
        without = {name: t for name, t in given.items() if name != ARGUMENTS[family]}
        assert not torch.equal(run(ours, without).existing(mask).states, runs[0].states)


@pytest.mark.parametrize("is_given", [True, False])
@every_family
def test_gradients(family, is_given) -> None:
    stock, given = build(family), batch(family)
    if not is_given:
        del given[ARGUMENTS[family]]
    ours = fastbert.accelerate(copy.deepcopy(stock))
    sides = (ours, in_dtype(stock, torch.float64), stock)
    runs = run_sides(lambda side: run_with_gradients(side, given)[1], *sides)
    assert {f"embeddings.{table}.weight" for table in TABLES[family]} <= runs[0].keys()
    assert_gradients_close(*runs)


@every_family
def test_packed_rows(family, tmp_path) -> None:
    ours, given = native(build(family), tmp_path), batch(family)
    kept = given.pop("attention_mask").bool()
    ends = torch.tensor([0, *kept.sum(1)]).cumsum(0).int()
    with torch.no_grad():
        padded = ours(**given, attention_mask=kept).last_hidden_state[kept]
        packed = ours(**{name: t[kept] for name, t in given.items()}, cu_seqlens=ends)
    torch.testing.assert_close(packed.last_hidden_state, padded)


@every_family
def test_a_hook_on_the_embeddings_leaves_the_argument(family) -> None:
    """With a hook on the embeddings, an accelerated model calls them as the stock model does."""
    stock, given = build(family), batch(family)
    ours = fastbert.accelerate(copy.deepcopy(stock))
    fired: list[int] = []
    ours.embeddings.register_forward_hook(lambda *_: fired.append(1))
    with torch.no_grad():
        for argument in (True, False):
            if not argument:
                del given[ARGUMENTS[family]]
            actual, expected = (
                run(side, given).existing(given["attention_mask"]).states for side in (ours, stock)
            )
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert len(fired) == 2


def test_bad_task_types(tmp_path) -> None:
    ours, given = native(build("ernie"), tmp_path), batch("ernie")
    given["task_type_ids"][1, 2] = 3
    with pytest.raises(ValueError, match=r"^task_type_ids: got 3, allowed: 0 <= task_type_ids < 3"):
        ours(**given)
    given["task_type_ids"] = given["task_type_ids"][:, :4]
    with pytest.raises(ValueError, match=r"^task_type_ids: got shape"):
        ours(**given)
    without = native(build("ernie", use_task_id=False), tmp_path / "without")
    with pytest.raises(ValueError, match=r"^task_type_ids: got a tensor, allowed: None: ernie has"):
        without(**batch("ernie"))


def test_bad_boxes(tmp_path) -> None:
    ours, given = native(build("layoutlm"), tmp_path), batch("layoutlm")
    boxes = given["bbox"].clone()
    for box, message in (
        ([1, 2, 60, 4], r"^bbox: got 60, allowed: 0 <= bbox < 60"),
        ([1, 2, 3, 1], r"^bbox, lower - upper: got -1, allowed"),
        ([4, 2, 3, 5], r"^bbox, right - left: got -1, allowed"),
    ):
        given["bbox"] = boxes.clone()
        given["bbox"][0, 2] = torch.tensor(box)
        with pytest.raises(ValueError, match=message):
            ours(**given)
    given["bbox"] = boxes[..., :3]
    with pytest.raises(ValueError, match=r"^bbox: got shape"):
        ours(**given)
    without = native(build("bert"), tmp_path / "without")
    with pytest.raises(ValueError, match=r"^bbox: got a tensor, allowed: None: bert has no boxes"):
        without(**(given | {"bbox": boxes}))


def test_without_a_table_transformers_ignores_task_types() -> None:
    """Without ``use_task_id``, the accelerated model ignores the argument, as stock does."""
    stock, given = build("ernie", use_task_id=False), batch("ernie")
    ours = fastbert.accelerate(copy.deepcopy(stock))
    sides = (ours, in_dtype(stock, torch.float64), stock)
    mask = given["attention_mask"]
    with torch.no_grad():
        assert_outputs_close(*run_sides(lambda side: run(side, given).existing(mask), *sides))
