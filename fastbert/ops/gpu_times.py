"""The table of GPU times by which ``backend=None`` chooses between CUDA C++ and Triton.

``gpu_times.json`` holds the time of an operation by GPU, dtype, shape and backend. A time is a
prediction from counted instructions until a benchmark on the GPU replaces it. Only measured times
change the order of the backends; a prediction is only shown. ``python -m fastbert.bench.choice``
writes the file from the result files in ``benchmarks/results``.

Both backends leave matrix products without an activation to cuBLAS, and the time of an operation
includes these products. The time of a product with an activation depends on the number of rows.
With many tiles, all multiprocessors are busy and the activation of one tile overlaps the products
of another tile. With few tiles, some multiprocessors are idle. The size of a product in the table
is therefore the number of rows, and the size of attention is the length of the sequences.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_name("gpu_times.json")
# Times that differ by less than this share count as equal, because no time is more exact.
MARGIN = 0.05
# Number of rows of a large batch. Where the number of rows is unknown, the choice for this number
# of rows is shown.
MANY_ROWS = 16384
PREDICTED, MEASURED = "predicted", "measured"
# The dtype of an entry that holds for bf16 and for fp16; its times are those of bf16.
SIXTEEN_BITS = "16 bits"


class Point(NamedTuple):
    """The times of one operation at one shape on one GPU.

    Attributes:
        op: Name of the operation.
        arch: Architecture of the GPU, such as 90 for compute capability 9.0.
        gpu: Name of the GPU.
        dtype: Name of the dtype, or "16 bits" for bf16 and fp16.
        shape: Name of the shape, such as "S512 D64".
        width: Head dim of attention, columns of the rows of a norm, or columns of the left operand
            of a product.
        size: Length of the sequences of attention, or rows of a product; 0 for a norm, because the
            order of its backends does not depend on the number of rows.
        kind: "predicted" or "measured".
        forward: Seconds of a forward pass by backend.
        backward: Seconds of a backward pass by backend.
    """

    op: str
    arch: int
    gpu: str
    dtype: str
    shape: str
    width: int
    size: int
    kind: str
    forward: dict[str, float]
    backward: dict[str, float]

    def seconds(self, trained: bool) -> dict[str, float]:
        """Return the seconds by backend of the forward pass, or of both passes if `trained`."""
        if not trained:
            return self.forward
        both = self.forward.keys() & self.backward.keys()
        return {name: self.forward[name] + self.backward[name] for name in both}


def load(path: Path = TABLE) -> tuple[Point, ...]:
    """Read the points of the table from a file.

    Args:
        path: JSON file with a list of points under "points", each with the fields of `Point`.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))["points"]
    return tuple(Point(**row) for row in rows)


POINTS = load()


def nearest(
    points: Iterable[Point],
    op: str,
    capability: tuple[int, int],
    dtype: str,
    width: int = 0,
    size: int = 0,
) -> Point | None:
    """Return the point that is nearest to a call, or None if no point fits the call.

    Predicted points are used only if no measured point fits the operation, the dtype and the GPU.
    Code for a compute capability also runs on later GPUs of the same major number, so the point is
    taken from the newest architecture whose code runs on the GPU. Among the shapes of this
    architecture, the point with the nearest width is chosen, and then the point with the nearest
    size. The nearest of two numbers is the one whose ratio to the wanted number is closer to 1.

    Args:
        points: The points of the table.
        op: Name of the operation.
        capability: Compute capability of the GPU.
        dtype: Name of the dtype.
        width: As in `Point`.
        size: As in `Point`.
    """
    kind = SIXTEEN_BITS if dtype in ("bfloat16", "float16") else dtype
    candidates = [
        point
        for point in points
        if point.op == op and point.dtype == kind and is_code_for(point, capability)
    ]
    candidates = [point for point in candidates if point.kind == MEASURED] or candidates
    if not candidates:
        return None
    arch = max([point.arch for point in candidates])
    candidates = [point for point in candidates if point.arch == arch]
    closest = _closest([point.width for point in candidates], width)
    candidates = [point for point in candidates if point.width == closest]
    closest = _closest([point.size for point in candidates], size)
    return next(point for point in candidates if point.size == closest)


def is_code_for(point: Point, capability: tuple[int, int]) -> bool:
    """Tell whether code for the architecture of `point` runs on a GPU with this `capability`."""
    major, minor = capability
    return point.arch // 10 == major and point.arch % 10 <= minor


def _closest(values: Sequence[int], wanted: int) -> int:
    """Return the value whose ratio to `wanted` is nearest to 1."""
    ascending = sorted(values)
    for smaller, larger in itertools.pairwise(ascending):
        if wanted * wanted < smaller * larger:
            return smaller
    return ascending[-1]


def length_class(length: int) -> int:
    """Return the power of two from 64 to 2048 whose ratio to `length` is nearest to 1.

    `backend.resolve` keeps one choice for each of these classes instead of a choice for every
    length. Under torch.compile, `length` stays symbolic, because it is compared with literals.
    """
    if length < 363:
        return 64 if length < 91 else 128 if length < 182 else 256
    return 512 if length < 725 else 1024 if length < 1449 else 2048


def rows_class(rows: int) -> int:
    """Return 128, 2048 or 16384: the number whose ratio to `rows` is nearest to 1.

    The table has products with these numbers of rows. `length_class` gives the reason for classes.
    """
    return 128 if rows < 512 else 2048 if rows < 5793 else MANY_ROWS


def order(point: Point | None, trained: bool, default: Sequence[str]) -> tuple[str, ...]:
    """Return the backends in order of preference, the fastest first.

    Args:
        point: The point of the call, or None.
        trained: Whether the backward pass counts.
        default: The backends in the order that holds without a measured point. Of the backends
            whose times are within `MARGIN` of the fastest time, the first in this order comes
            first. Backends without a time come last, in this order. With fewer than two times, the
            result is this order.
    """
    if point is None or point.kind != MEASURED:
        return tuple(default)
    times = point.seconds(trained)
    timed = [name for name in default if name in times]
    if len(timed) < 2:
        return tuple(default)
    fastest = min(times[name] for name in timed)
    first = next(name for name in timed if times[name] <= (1 + MARGIN) * fastest)
    others = sorted((name for name in timed if name != first), key=lambda name: times[name])
    return (first, *others, *(name for name in default if name not in times))


def reason(point: Point, trained: bool) -> str:
    """Return the times of a point in words.

    For a predicted point, the text says that no recorded run decides.
    """
    times = sorted(point.seconds(trained).items(), key=lambda item: item[1])
    listed = ", ".join(f"{name} {1e6 * seconds:.1f} µs" for name, seconds in times)
    passes = "forward and backward" if trained else "forward"
    words = f"{point.kind} for {point.gpu}, {point.shape}, {point.dtype}, {passes}: {listed}"
    return words if point.kind == MEASURED else f"no recorded run decides ({words})"


def rows(points: Iterable[Point], default: Sequence[str]) -> list[dict[str, Any]]:
    """Return the times of the points as dictionaries, with the backend that is preferred.

    Each point gives two dictionaries: one for the forward, and one for the forward and the backward
    together. `default` is as in `order`.
    """
    return [
        {
            "op": point.op,
            "architecture": f"sm_{point.arch}",
            "gpu": point.gpu,
            "dtype": point.dtype,
            "shape": point.shape,
            "pass": "forward + backward" if trained else "forward",
            "kind": point.kind,
            "microseconds": {
                name: round(1e6 * seconds, 1)
                for name, seconds in sorted(point.seconds(trained).items())
            },
            "first": order(point, trained, default)[0],
        }
        for point in points
        for trained in (False, True)
    ]
