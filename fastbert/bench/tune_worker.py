"""The process in which ``fastbert tune`` checks and times candidates; it may hang and be killed.

The program reads requests from standard input and answers each one on standard output, one JSON
object per line.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fastbert.bench.limits import BOTH, FORWARD
from fastbert.bench.operations import build, gate, rotated_inputs
from fastbert.bench.timing import Watch, alternate
from fastbert.testing import parity
from fastbert.testing.cases import Case

# A function that returns the object that measures the calls in a direction.
WatchOf = Callable[[str], Watch | None]


class Trial:
    """The candidates of this process.

    Args:
        device: Device type of the tensors.
        watch_of: Function that returns the watch of a direction; None is a stopwatch.
    """

    def __init__(self, device: str = "cuda", watch_of: WatchOf = lambda direction: None) -> None:
        self.device = device
        self.watch_of = watch_of
        # What the quick parity cases say, by operation, dtype and backend.
        self.gates: dict[tuple[str, ...], str | None] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; an error of the candidate is its problem."""
        try:
            if request["do"] == "check":
                return {"problem": self.problem(request)}
            return {"problem": None, "times": self.times(request)}
        except Exception as error:
            return {"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}

    def problem(self, request: dict[str, Any]) -> str | None:
        """Return the parity case that the candidate fails, or None."""
        candidate, dtype = request["candidate"], getattr(torch, request["dtype"])
        key = (request["op"], request["dtype"], candidate["backend"])
        if key not in self.gates:
            self.gates[key] = gate(request["op"], candidate["backend"], dtype)
        if self.gates[key] is not None:
            return self.gates[key]
        with choosing(candidate):
            case = Case(request["op"], "tuned", tuple(request["small"]))
            for result in parity.check_case(case, candidate["backend"], dtype, self.device):
                if not result.passed:
                    return f"parity is red at this shape: {result}"
        return None

    def times(self, request: dict[str, Any]) -> dict[str, list[float]]:
        """Return the seconds of the forward and of the backward by the name of the candidate."""
        case, dtype = Case(request["op"], "tuned", tuple(request["case"])), request["dtype"]
        sets = rotated_inputs(case, getattr(torch, dtype), self.device)
        medians = []
        for direction in (FORWARD, BOTH):
            calls: Mapping[str, Any] = {
                candidate["name"]: functools.partial(
                    run_chosen, candidate, build(case.op, candidate["backend"], direction, sets)
                )
                for candidate in request["candidates"]
            }
            with torch.inference_mode(direction == FORWARD):
                timings = alternate(
                    calls,
                    device=self.device,
                    seconds=request["seconds"],
                    watch=self.watch_of(direction),
                )
            medians.append({name: timing.median for name, timing in timings.items()})
        forward, both = medians
        return {name: [forward[name], max(0.0, both[name] - forward[name])] for name in forward}


def run_chosen(candidate: dict[str, Any], call: Callable[[int], object], index: int) -> object:
    """Run a call with the choices of a candidate."""
    with choosing(candidate):
        return call(index)


@contextlib.contextmanager
def choosing(candidate: dict[str, Any]) -> Iterator[None]:
    """Let the Triton kernels take the choices of the candidate inside the block."""
    if candidate["backend"] != "triton":
        yield
        return
    from fastbert.kernels import tiles

    sized = {
        name: {int(size): choice for size, choice in by_size.items()}
        for name, by_size in candidate["choices"].items()
    }
    with tiles.tuned(sized):
        yield


def serve(trial: Trial) -> None:
    """Answer the requests on standard input until it ends.

    Whatever else writes to standard output, such as a compiler, writes to standard error instead.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(trial.answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(Trial())
