"""Measure on the user's GPU which backend, path and tile is the fastest at each shape.

A candidate is a backend with the choices that its kernels take, such as the Triton kernels of
attention on their short path. Each candidate first passes the parity check, and only then it is
timed. Candidates run in a process of their own (``tune_worker``): a candidate that hangs, or ends
the process, is left out, and a new process goes on with the next one.
"""

from __future__ import annotations

import datetime
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastbert import json_file
from fastbert.bench.encoder import BASE, MINILM
from fastbert.config import BertConfig
from fastbert.ops import backend as backends
from fastbert.ops import tuned
from fastbert.ops.backend import dtype_name
from fastbert.ops.gpu_times import MARGIN, MEASURED, SIXTEEN_BITS, Point
from fastbert.testing import parity
from fastbert.testing.cases import Case

# Tokens of a batch of attention, and rows of a layer norm: enough to fill every GPU.
TOKENS = 16384
# The lengths of attention and the numbers of rows of products that are measured. The choice for
# another number is the one that was measured nearest to it.
LENGTHS = (64, 128, 256, 512, 2048)
ROWS = (128, 2048, 16384)
# Seconds after which a candidate counts as hung. The time includes the start of the process and the
# compilation of the candidate's kernels.
LIMIT_S = 120.0
# Seconds in which the candidates of a shape are timed in one direction.
SECONDS = 0.25
WORKER = (sys.executable, "-m", "fastbert.bench.tune_worker")


class Ended(Exception):
    """The worker did not answer: it hangs, or it has ended."""


@dataclass(frozen=True)
class Shape:
    """An operation at a shape.

    Args:
        op: Name of the operation.
        name: Name of the shape, as in `Point.shape`.
        width: As in `Point.width`.
        size: As in `Point.size`.
        case: Sizes of the timed call, as in `Case.shape`.
        small: Sizes of the call whose values are checked, which has the same kernels.
    """

    op: str
    name: str
    width: int
    size: int
    case: tuple[int, ...]
    small: tuple[int, ...]


@dataclass(frozen=True)
class Candidate:
    """A backend, and the choices of its kernels as `kernels.tiles.TUNED` holds them.

    Args:
        name: Name for the user, such as "triton short".
        backend: Name of the backend.
        choices: The choices; the kernels make all other choices by their own rules.
    """

    name: str
    backend: str
    choices: dict[str, dict[int, Any]] = field(default_factory=dict)


class Row(NamedTuple):
    """The result of one candidate at one shape: its seconds, or the reason why it has none."""

    op: str
    shape: str
    dtype: str
    candidate: str
    forward: float | None = None
    backward: float | None = None
    left_out: str | None = None


@dataclass
class Result:
    """The results of all candidates, and the table that follows from them."""

    rows: list[Row] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    choices: dict[str, dict[int, Any]] = field(default_factory=dict)

    def table(self) -> tuned.Tuned:
        """Return the table for `ops.tuned`."""
        return tuned.Tuned(tuple(self.points), self.choices)


def shapes_of(config: BertConfig) -> list[Shape]:
    """Return the shapes of a model: its attention, its layer norm and its feed-forward."""
    longest = max(LENGTHS[0], config.max_length)
    lengths = [length for length in LENGTHS if length <= longest]
    hidden, inner = config.hidden_size, config.intermediate_size
    return [
        *(attention(config.num_attention_heads, length, config.head_dim) for length in lengths),
        norm(hidden),
        *(product("linear_gelu", rows, hidden, inner) for rows in ROWS),
        *(product("feed_forward", rows, hidden, inner) for rows in ROWS),
    ]


def default_shapes() -> list[Shape]:
    """Return the shapes of BERT-base and of MiniLM."""
    return [*shapes_of(BASE), *shapes_of(MINILM)]


def attention(heads: int, length: int, head_dim: int, tokens: int = TOKENS) -> Shape:
    batch = max(1, tokens // length)
    return Shape(
        "attention",
        f"S{length} D{head_dim}",
        head_dim,
        length,
        (batch, heads, length, length, head_dim),
        (1, min(heads, 2), length, length, head_dim),
    )


def norm(columns: int, rows: int = TOKENS) -> Shape:
    return Shape("layer_norm", f"{columns} columns", columns, 0, (rows, columns), (64, columns))


def product(op: str, rows: int, columns: int, inner: int) -> Shape:
    # A candidate has a single choice, which holds for every number of rows.
    small = (min(rows, 192), columns, inner)
    name = f"{rows}×{columns}×{inner}"
    return Shape(op, name, columns, rows, (rows, columns, inner), small)


def candidates(shape: Shape, dtype: torch.dtype, device: str = "cuda") -> list[Candidate]:
    """Return the candidates that can serve a shape, the default of each backend first."""
    case = Case(shape.op, shape.name, shape.case)
    served = [
        name for name in backends.ORDER["cuda"] if parity.refusal(case, name, dtype, device) is None
    ]
    found = [Candidate(name, name) for name in served]
    if "triton" in served and dtype != torch.float32:
        found = [*triton_variants(shape, dtype), *(c for c in found if c.backend != "triton")]
    return found


def triton_variants(shape: Shape, dtype: torch.dtype) -> list[Candidate]:
    """Return the Triton kernels of a shape on each path, and with each tile of the general one."""
    from fastbert.kernels import tiles

    found: list[Candidate] = []

    def add(words: str, choices: dict[str, Any]) -> None:
        sized = {name: {shape.size: choice} for name, choice in choices.items()}
        found.append(Candidate(f"triton {words}", "triton", sized))

    if shape.op == "attention":
        forward, backward = (
            tiles.attention_path_name(name, shape.width) for name in ("forward", "backward")
        )
        if tiles.short_attention_obstacle("forward", shape.size, shape.width, dtype) is None:
            add("short", {forward: "short", backward: "short"})
        for tile in tiles.ATTENTION_TILES if shape.width <= 64 else (None,):
            choices: dict[str, Any] = {forward: "general", backward: "general"}
            if tile is not None:
                choices[tiles.attention_tile_name(shape.width)] = list(tile)
            add(f"general{_words(tile)}", choices)
    elif shape.op in ("linear_gelu", "feed_forward"):
        path, columns = tiles.gemm_path_name(shape.width), shape.case[2]
        add("library", {path: "library"})
        for tile in tiles.GEMM_TILES_TRIED:
            add(f"fused{_words(tile)}", {path: "fused", tiles.gemm_tile_name(columns): list(tile)})
    else:
        add("", {})
    return found


def _words(tile: Any) -> str:
    if tile is None:
        return ""
    return f" {tile.block_m}×{tile.block_n}, {tile.num_warps} warps, {tile.num_stages} stages"


class Worker:
    """The process that runs the candidates, which is started when it is needed."""

    def __init__(self, command: Sequence[str] = WORKER) -> None:
        self.command = command
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            Ended: If there is no answer after `limit_s` seconds. The process has been killed then.
        """
        if self.process is None:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            line = b""
            deadline = time.monotonic() + limit_s
            while not line.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                    self.end()
                    raise Ended(f"it hangs: no answer after {limit_s:g} s")
                read = os.read(self.process.stdout.fileno(), 1 << 16)
                if not read:
                    raise BrokenPipeError
                line += read
        except BrokenPipeError:
            status = self.process.wait()
            self.end()
            raise Ended(f"its process ended with status {status}") from None
        answer: dict[str, Any] = json.loads(line)
        return answer


def tune(
    shapes: Sequence[Shape],
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    *,
    gpu: str,
    arch: int,
    worker: Sequence[str] = WORKER,
    device: str = "cuda",
    seconds: float = SECONDS,
    limit_s: float = LIMIT_S,
    advance: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> Result:
    """Check and time all candidates.

    Args:
        shapes: The shapes.
        dtypes: The dtypes. Times in bf16 hold for fp16 too.
        gpu: Name of the GPU.
        arch: Its architecture, such as 90 for compute capability 9.0.
        worker: Command that starts the process of the candidates.
        device: Device type on which the candidates are served.
        seconds: Seconds of timing for one shape in one direction.
        limit_s: Seconds after which a candidate counts as hung.
        advance: Function that is told the text of the current step, and how many steps of how many
            are done.

    Returns:
        The result. A shape at which no candidate passes has no point, so the default stays.
    """
    result = Result()
    plan = [(s, dtype, candidates(s, dtype, device)) for s in shapes for dtype in dtypes]
    total, done = sum(len(found) + 1 for *_, found in plan), 0
    with Worker(worker) as process:
        for shape, dtype, found in plan:
            label = f"{shape.op} {shape.name}, {dtype_name(dtype)}"
            passed = []
            for candidate in found:
                advance(f"{label}: {candidate.name}", done, total)
                done += 1
                problem = _problem(process, shape, dtype, candidate, limit_s)
                if problem is None:
                    passed.append(candidate)
                else:
                    result.rows.append(_row(shape, dtype, candidate, left_out=problem))
            advance(f"{label}: timing", done, total)
            done += 1
            times = _times(process, shape, dtype, passed, seconds, limit_s)
            if isinstance(times, str):
                result.rows += [_row(shape, dtype, c, left_out=times) for c in passed]
                continue
            result.rows += [
                _row(shape, dtype, c, forward=times[c.name][0], backward=times[c.name][1])
                for c in passed
            ]
            _conclude(result, shape, dtype, passed, times, (gpu, arch))
    advance("done", total, total)
    return result


def _row(shape: Shape, dtype: torch.dtype, candidate: Candidate, **facts: Any) -> Row:
    return Row(shape.op, shape.name, dtype_name(dtype), candidate.name, **facts)


def _request(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    return {"op": shape.op, "dtype": dtype_name(dtype), "case": shape.case, "small": shape.small}


def _problem(
    process: Worker, shape: Shape, dtype: torch.dtype, candidate: Candidate, limit_s: float
) -> str | None:
    """Return why a candidate must not be timed, or None if its values pass the parity check."""
    request = _request(shape, dtype) | {"do": "check", "candidate": asdict(candidate)}
    try:
        problem: str | None = process.ask(request, limit_s)["problem"]
    except Ended as ended:
        return str(ended)
    return problem


def _times(
    process: Worker,
    shape: Shape,
    dtype: torch.dtype,
    passed: Sequence[Candidate],
    seconds: float,
    limit_s: float,
) -> dict[str, list[float]] | str:
    """Return the seconds of the forward and of the backward of each candidate, or what failed."""
    if not passed:
        return {}
    found = [asdict(candidate) for candidate in passed]
    request = _request(shape, dtype) | {"do": "time", "candidates": found, "seconds": seconds}
    try:
        answer = process.ask(request, limit_s * len(passed))
    except Ended as ended:
        return f"while the candidates took turns: {ended}"
    return answer["problem"] or answer["times"]


def _conclude(
    result: Result,
    shape: Shape,
    dtype: torch.dtype,
    passed: Sequence[Candidate],
    times: dict[str, list[float]],
    gpu: tuple[str, int],
) -> None:
    """Add the point of a shape, and the choices of the fastest Triton variant in each pass."""
    by_backend: dict[str, list[Candidate]] = {}
    for candidate in passed:
        by_backend.setdefault(candidate.backend, []).append(candidate)
    if not by_backend:
        return
    seconds = [
        {name: min(times[c.name][index] for c in own) for name, own in by_backend.items()}
        for index in (0, 1)
    ]
    name = dtype_name(dtype)
    result.points.append(
        Point(
            shape.op,
            gpu[1],
            gpu[0],
            SIXTEEN_BITS if name == "bfloat16" else name,
            shape.name,
            shape.width,
            shape.size,
            MEASURED,
            *seconds,
        )
    )
    for index in (0, 1) if "triton" in by_backend else ():
        best = _fastest(by_backend["triton"], times, index)
        for choice, by_size in best.choices.items():
            # A choice whose name has no pass follows the forward.
            if (", backward," in choice) == (index == 1):
                result.choices.setdefault(choice, {}).update(by_size)


def _fastest(found: Sequence[Candidate], times: dict[str, list[float]], index: int) -> Candidate:
    """Return the first candidate whose time is within `MARGIN` of the fastest."""
    least = min(times[c.name][index] for c in found)
    return next(c for c in found if times[c.name][index] <= (1 + MARGIN) * least)


def save(result: Result, file: Path, named: dict[str, str | None]) -> None:
    """Write the table to a file, completely or not at all.

    Raises:
        OSError: If the file cannot be written.
    """
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    rows = [row._asdict() for row in result.rows]
    content = tuned.content_of(named, result.table()) | {"date": now, "rows": rows}
    json_file.write(file, content, json_file.record)


def winners(result: Result) -> Iterator[tuple[Row, bool]]:
    """Yield each row, and whether it is the fastest of its shape in the forward."""
    for row in result.rows:
        same = [r.forward for r in result.rows if r[:3] == row[:3] and r.forward is not None]
        yield row, row.forward is not None and row.forward == min(same)
