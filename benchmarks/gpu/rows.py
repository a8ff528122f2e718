"""The matches of the memory-bound operations: layer_norm, rms_norm and embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.contenders import ours, stock
from benchmarks.gpu.match import Match, of_case
from fastbert import ops
from fastbert.bench import peers
from fastbert.bench.limits import BACKWARD, FORWARD, GOALS
from fastbert.testing.cases import OPS, Case

BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Scale:
    """Sizes of the matches: rows of a pass, columns (widths) of the models, and vocabulary."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    vocabulary: int


# Columns of BERT-large, BERT-base and MiniLM. The rows are a training batch, then smaller batches
# whose tensors fit in the L2 cache.
FULL = Scale((65536, 16384, 2048), (1024, 768, 384), 30522)
TOY = Scale((48,), (64,), 97)


def matches(scale: Scale, device: str) -> Iterator[Match]:
    large = (scale.rows[0], scale.columns[0])
    # With dropout, the backward pass also writes the gradient of the residual, a fourth tensor.
    for options in ({}, {"dropout_p": 0.1}, {"residual": False, "x_bias": False}):
        yield from _norm("layer_norm", large, options, BF16, device, wanted=True)
    yield from _norm("layer_norm", large, {"dropout_p": 0.1}, FP16, device, wanted=True)
    for rows in scale.rows:
        for columns in scale.columns:
            if (rows, columns) != large:
                yield from _norm("layer_norm", (rows, columns), {"dropout_p": 0.1}, BF16, device)
    if has("rms_norm"):
        for columns in scale.columns:
            yield from _norm("rms_norm", (scale.rows[0], columns), {}, BF16, device)
    for rows, columns in ((scale.rows[0], columns) for columns in scale.columns):
        case = Case("embedding", f"{rows}×{columns}", (rows, scale.vocabulary, columns))
        for direction in (FORWARD, BACKWARD):
            yield _match(case, BF16, direction, device)


def has(op: str) -> bool:
    """Whether this build has the operation `op`, registered cases for it, and a peer."""
    return op in OPS and hasattr(ops, op) and op in peers.OPS


def _norm(op, shape, options, dtype, device, wanted=False) -> Iterator[Match]:
    names = [
        "drop" if options.get("dropout_p") else "",
        "alone" if options.get("residual") is False else "",
    ]
    name = " ".join(["×".join(map(str, shape)), *filter(None, names)])
    for direction in (FORWARD, BACKWARD):
        goal = GOALS[f"layer_norm {direction}"] if wanted else None
        yield _match(Case(op, name, shape, options), dtype, direction, device, goal)


def _match(case, dtype, direction, device, goal=None) -> Match:
    contenders = [*ours(case, dtype, device), *stock(case.op, device)]
    return of_case(case, dtype, direction, contenders, "GB/s", goal=goal)
