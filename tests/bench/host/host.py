"""Measure the CPU time of one layer of BERT-base on a mocked GPU.

``python tests/bench/host/host.py`` prints one line of JSON for each kind of call: the smallest time
per layer in µs, the numbers of Python function calls and of launches per layer, and the operators
that wait for the GPU. The number of function calls is the same in every run and on every machine,
so tests can limit it. The function `yardstick` measures the speed of the machine by calls of an
empty Python function.

``mocked_cuda.py`` lists the costs of a real GPU that the times do not include.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mocked_cuda
import torch
from torch import Tensor

from fastbert.config import BertConfig

# The model has few layers, because a short call is rarely interrupted by other processes.
LAYERS = 2
LENGTHS = (128, 128, 120, 112, 100, 96, 90, 64)


class Figures(NamedTuple):
    """The CPU time and work for one layer.

    Attributes:
        microseconds: Smallest CPU time in µs.
        calls: Number of calls of Python functions.
        launches: Number of launches of Triton kernels.
        waits: Operators in one whole call that would wait for the GPU.
    """

    microseconds: float
    calls: float
    launches: float
    waits: list[str]


def yardstick(repetitions: int = 200) -> float:
    """Return the smallest time of 1,000 calls of an empty Python function in µs."""

    def empty() -> None:
        pass

    def calls() -> None:
        for _ in range(1000):
            empty()

    return _smallest(calls, repetitions)


def _smallest(function: Callable[[], Any], repetitions: int) -> float:
    best = float("inf")
    for _ in range(repetitions):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return 1e6 * best


def python_calls(function: Callable[[], Any]) -> int:
    """Return how many Python function calls `function` makes, including its own call."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        # With multithreading, the backward would run in another thread, whose calls are not
        # counted.
        with torch.autograd.set_multithreading_enabled(False):
            function()
    finally:
        sys.setprofile(None)
    return count


def measure(
    function: Callable[[], Any],
    repetitions: int,
    after: Callable[[], Any] = lambda: None,
) -> Figures:
    """Measure one call of `function`, and divide its figures by the number of layers.

    Args:
        function: The call, which runs `LAYERS` layers.
        repetitions: Number of timed calls.
        after: Function that is called after each timed call.
    """
    for _ in range(3):
        function()
        after()
    mocked_cuda.waits()
    before = mocked_cuda.launches()
    function()
    launches, waits = mocked_cuda.launches() - before, mocked_cuda.waits()
    after()
    calls = python_calls(function)
    after()
    best = float("inf")
    for _ in range(repetitions):
        best = min(best, _smallest(function, 1))
        after()
    return Figures(best / LAYERS, calls / LAYERS, launches / LAYERS, waits)


def kinds(repetitions: int) -> Iterator[tuple[str, Figures]]:
    """Yield the name and the figures of each kind of call of BERT-base in bf16.

    The kind "inference, whole call" includes embeddings, removal of padding, and the pooler. Their
    torch operators run on the CPU here, so the time of this kind is too long.
    """
    from fastbert.modules import BertModel

    # With one thread, torch operators on the CPU do not wait for other threads.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = BertModel(BertConfig(num_hidden_layers=LAYERS)).to(torch.bfloat16).eval()
    ids = torch.randint(5, 1000, (len(LENGTHS), max(LENGTHS))).cuda()
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).cuda()
    with torch.no_grad():
        yield "inference, whole call", measure(lambda: model(ids, mask), repetitions)
        encoder = _encoder_call(model, ids, mask)
        yield "inference", measure(encoder, repetitions)
    model.train()
    yield from _training("training", model, ids, mask, repetitions)
    model.float()
    with torch.autocast("cuda", torch.bfloat16):
        yield from _training("training, autocast", model, ids, mask, repetitions)


def _encoder_call(model: Any, ids: Tensor, mask: Tensor) -> Callable[[], Tensor]:
    """Return a function that calls the encoder with the arguments that `model` passes to it."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def keep(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        found.append((arguments, options))

    hook = model.encoder.register_forward_pre_hook(keep, with_kwargs=True)
    model(ids, mask)
    hook.remove()
    (hidden, *others), options = found[0]
    hidden = hidden.detach().requires_grad_(torch.is_grad_enabled())
    return lambda: model.encoder(hidden, *others, **options)[0]


def _training(
    name: str, model: Any, ids: Tensor, mask: Tensor, repetitions: int
) -> Iterator[tuple[str, Figures]]:
    encoder = _encoder_call(model, ids, mask)
    results: list[Tensor] = []

    def forward() -> None:
        results[:] = [encoder()]

    def again() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        forward()

    again()
    dout = torch.ones_like(results[0])
    yield f"{name}, forward", measure(forward, repetitions)

    def backward() -> None:
        torch.autograd.backward(results[0], dout)

    yield f"{name}, backward", measure(backward, repetitions, again)


def child(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` with the mocked GPU, and return the finished process."""
    command = [sys.executable, *arguments]
    environment = mocked_cuda.environment(folder)
    return subprocess.run(command, env=environment, text=True, capture_output=True, check=False)


def main() -> int:
    """Print the figures of each kind of call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=300, help="timed calls of each kind")
    parser.add_argument("--build", type=Path, default=Path(tempfile.gettempdir(), "mocked_cuda"))
    given = parser.parse_args()
    if not mocked_cuda.is_loaded():
        result = child([__file__, *sys.argv[1:]], given.build)
        print(result.stdout, end="")
        print(result.stderr, end="", file=sys.stderr)
        return result.returncode
    mocked_cuda.activate()
    for name, figures in kinds(given.repetitions):
        line = {"kind": name, **figures._asdict(), "yardstick": yardstick()}
        print(json.dumps(line), flush=True)
    mocked_cuda.leave()


if __name__ == "__main__":
    sys.exit(main())
