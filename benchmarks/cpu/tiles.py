"""Time the schedules of the kernels on AMX tiles in turns, and choose the fastest schedule.

The extension has three schedules (``csrc/cpu/isa/kernels.h``) whose results have the same bits.
This section times each of them on the products and the attention of BERT-base and MiniLM. The
fastest one is written to ``fastbert/ops/tile_schedule.json``, which the package reads at import.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastbert.machine import Machine

SCHEDULES = ("in_turn", "overlapped", "fetched")
NO_TILES = "the level in use has no AMX tiles"
CHOICE = Path(__file__).parents[2] / "fastbert" / "ops" / "tile_schedule.json"
# A schedule replaces the best earlier one in `SCHEDULES` only if it is faster by this factor.
MARGIN = 1.01
# PRODUCTS has the rows, inputs and outputs of matrix products. ATTENTION has the batch, length,
# heads and head dim of attention.
PRODUCTS = tuple(
    (rows, k, n)
    for width in (768, 384)
    for rows in (32, 128, 1024)
    for k, n in ((width, 3 * width), (width, 4 * width), (4 * width, width))
)
ATTENTION = tuple(
    (batch, length, width // dim, dim)
    for width, dim in ((768, 64), (384, 32))
    for batch, length in ((1, 128), (8, 128), (4, 512))
)
QUICK = ((40, 64, 96),), ((2, 40, 2, 32),)


def run(seconds: float, notify: Callable[[str], None], *, quick: bool) -> dict[str, Any]:
    """Time the schedules; return the rows and the fastest schedule, or the reason for no result."""
    from fastbert.ops.backend import EXTENSION

    if EXTENSION is None or not (has_tiles() or quick):
        notify(f"tiles: {NO_TILES}")
        return {"rows": [], "fastest": None, "reason": NO_TILES}
    before = EXTENSION.tile_schedule()
    try:
        rows = list(_rows(*(QUICK if quick else (PRODUCTS, ATTENTION)), seconds, notify))
    finally:
        EXTENSION.set_tile_schedule(before)
    return {"rows": rows, "fastest": fastest(rows)}


def has_tiles() -> bool:
    """Return whether the kernels in use run on AMX tiles."""
    from fastbert.ops.backend import EXTENSION

    return EXTENSION is not None and EXTENSION.cpu_isa() == "amx"


def _rows(products: Any, attention: Any, seconds: float, notify: Callable[[str], None]) -> Any:
    import torch

    from fastbert.bench.timing import alternate
    from fastbert.ops.backend import EXTENSION

    for name, call in _calls(products, attention):

        def under(schedule: str, call: Callable[[], object] = call) -> Callable[[int], object]:
            def timed(_: int) -> object:
                EXTENSION.set_tile_schedule(schedule)
                return call()

            return timed

        with torch.inference_mode():
            contenders = {schedule: under(schedule) for schedule in SCHEDULES}
            timings = alternate(contenders, seconds=seconds, min_samples=3)
        taken = {schedule: timing.median for schedule, timing in timings.items()}
        notify(f"tiles: {name}: " + ", ".join(f"{k} {1e6 * v:.0f} µs" for k, v in taken.items()))
        yield {"call": name, "seconds": taken}


def _calls(products: Any, attention: Any) -> Any:
    import torch

    from fastbert import ops, reference
    from fastbert.ops.int8_linear import pack

    operators = torch.ops.fastbert_C
    for m, k, n in products:
        x, weight = (torch.randn(*shape).bfloat16() for shape in ((m, k), (n, k)))
        bias = torch.randn(n).bfloat16()
        yield (
            f"bf16 {m}×{k}×{n}",
            lambda x=x, w=weight, b=bias: operators.linear(x, w, b, None, "gelu", False),
        )
        int8 = pack(*reference.int8_weight(weight.float()), *operators.int8_layout())
        rest = (n, bias, None, "gelu", torch.bfloat16)
        yield (
            f"int8 {m}×{k}×{n}",
            lambda x=x, w=int8, rest=rest: operators.int8_linear(x, *w[:3], *rest),
        )
    for batch, length, heads, dim in attention:
        qkv = torch.randn(batch, length, 3, heads, dim).bfloat16()
        yield (
            f"attention {batch}×{length}, {heads} heads of {dim}",
            lambda qkv=qkv: ops.attention_qkvpacked(qkv),
        )


def fastest(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the fastest schedule; a later schedule must beat the best so far by `MARGIN`.

    All calls have the same weight: the ratio of two schedules is the geometric mean of their time
    ratios over the calls.
    """
    best = SCHEDULES[0]
    for schedule in SCHEDULES[1:]:
        ratios = [row["seconds"][best] / row["seconds"][schedule] for row in rows]
        if math.exp(sum(map(math.log, ratios)) / len(ratios)) > MARGIN:
            best = schedule
    return best


def lines(content: Mapping[str, Any]) -> list[str]:
    """Return the Markdown lines of this section."""
    if content["fastest"] is None:
        return ["", f"Not timed: {content['reason']}."]
    table = ["", "| call | " + " | ".join(f"{name}, µs" for name in SCHEDULES) + " |"]
    table.append("|---" * (len(SCHEDULES) + 1) + "|")
    for row in content["rows"]:
        times = " | ".join(f"{1e6 * row['seconds'][name]:.1f}" for name in SCHEDULES)
        table.append(f"| {row['call']} | {times} |")
    return [*table, "", f"The fastest schedule over all calls is `{content['fastest']}`."]


def keep(schedule: str, machine: Machine, path: Path = CHOICE) -> None:
    """Write the schedule to the file that the package reads."""
    where = "; ".join(machine.lines())
    content = {"schedule": schedule, "reason": f"timed by python -m benchmarks.cpu tiles: {where}"}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
