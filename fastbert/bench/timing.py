"""How anything is timed: candidates alternate in one run on rotated inputs; medians are kept."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# Enough input sets that what one call leaves in a last-level cache is gone when its set comes round
# again.
ROTATION_BYTES = 128 << 20
MAX_INPUT_SETS = 64
# A sample shorter than this would measure the clock and the first kernel launch.
SHORTEST_SAMPLE_S = 2e-3
MAX_CALLS_PER_SAMPLE = 1000


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median over ``samples`` samples, and the fastest and slowest tenth."""

    median: float
    p10: float
    p90: float
    samples: int


def input_sets(bytes_per_set: int, *, at_most: int = MAX_INPUT_SETS) -> int:
    """How many sets of inputs to rotate so that together they overflow the caches."""
    return max(2, min(at_most, -(-ROTATION_BYTES // max(1, bytes_per_set))))


class Watch(Protocol):
    """What measures a candidate: mean seconds of its calls ``first``, ``first + 1``, …"""

    def measure(self, call: Any, first: int, calls: int) -> float: ...


class Stopwatch:
    """Seconds that calls take on ``device``; on a GPU by events in its stream."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def measure(self, call: Callable[[int], object], first: int, calls: int) -> float:
        """Mean seconds of ``call(first)``, ``call(first + 1)``, … ``calls`` times."""
        if not self.on_gpu:
            start = time.perf_counter()
            for index in range(first, first + calls):
                call(index)
            return (time.perf_counter() - start) / calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for index in range(first, first + calls):
            call(index)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls


def captured(call: Callable[[int], object], calls: int) -> Callable[[int], object]:
    """A CUDA graph of ``call(0)`` … ``call(calls - 1)`` on the current stream; each use replays it.

    What is timed is then the kernels and the gaps between them, without the host's part. The stream
    must not be the default one, and a backward pass must come from a forward pass on the same
    stream. Raises RuntimeError where the call synchronises or cannot be captured otherwise.
    """
    for index in range(calls):
        call(index)  # compiles, plans, allocates what must exist before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for index in range(calls):
            call(index)
    return lambda _: graph.replay()


def peak_memory(call: Callable[[int], object]) -> int | None:
    """Bytes that one call holds at its highest above what was held before; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    call(0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(1)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def alternate(
    candidates: Mapping[str, Any],
    *,
    device: str = "cpu",
    seconds: float = 1.0,
    min_samples: int = 5,
    max_samples: int = 50,
    watch: Watch | None = None,
    once: Mapping[str, float] | None = None,
    settle: float = 0.0,
) -> dict[str, Timing]:
    """Times the candidates side by side and returns one ``Timing`` per name.

    A candidate is called with a running index, by which it picks one of its input sets. Every round
    takes one sample of each, and the round's order turns by one, so that a slow spell of the
    machine or a warm cache favours nobody. ``seconds`` bounds the whole, ``min_samples`` goes
    before it.

    ``watch`` measures candidates that are no calls of this process. ``once`` has the seconds of a
    call of each, made in turn, where the caller has warmed them up: their first samples. ``settle``
    is a pause in seconds before each sample.
    """
    watch = watch or Stopwatch(device)
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    if once is not None:
        samples = {name: [once[name]] for name in candidates}
    else:
        once = {}
        for name, candidate in candidates.items():
            watch.measure(candidate, 0, 1)  # compiles, allocates, packs weights
            once[name] = watch.measure(candidate, 1, 1)
    calls = {
        name: min(MAX_CALLS_PER_SAMPLE, max(1, int(SHORTEST_SAMPLE_S / max(once[name], 1e-9))))
        for name in candidates
    }
    names = list(candidates)
    deadline = time.perf_counter() + seconds
    first = len(samples[names[0]]) if names else 0
    for turn in range(first, max_samples):
        if turn >= min_samples and time.perf_counter() > deadline:
            break
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            if settle:
                time.sleep(settle)
            samples[name].append(
                watch.measure(candidates[name], 2 + turn * calls[name], calls[name])
            )
    return {name: summarize(times) for name, times in samples.items()}


def summarize(times: Sequence[float]) -> Timing:
    """The median of ``times`` and its tenths (the extremes, where there are fewer than ten)."""
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return Timing(
        statistics.median(ordered), ordered[tenth], ordered[len(ordered) - 1 - tenth], len(ordered)
    )
