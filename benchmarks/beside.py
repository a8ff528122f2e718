"""Parts of the benchmarks that time a model of fastbert beside stock code in one process."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cpu.worker import resident_peak
from fastbert import json_file
from fastbert.machine import describe

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The largest error of a hidden state against stock fp32. Hidden states are normal numbers.
ERRORS = {"fp32": 1e-3, "bf16": 0.25}


def batch(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Return random ids and their mask."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 20000, (len(lengths), max(lengths)), generator=generator)
    exists = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": exists.long()}


def require_error(name: str, error: float, allowed: float) -> None:
    """Raise RuntimeError if the error of a model is larger than allowed, or NaN."""
    if not error <= allowed:
        raise RuntimeError(f"{name}: error {error}, allowed {allowed}")


def in_turns(sides: dict[str, Any], call: Callable[[Any], Any], rounds: int) -> dict[str, Any]:
    """Time the models of all sides in turns.

    Args:
        sides: The models by the names of their sides.
        call: Function that calls a model.
        rounds: Number of timed calls of each model.

    Returns:
        For each side its shortest time as ``"<side> seconds"``, and all times as ``"<side> all
        seconds"``.
    """
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        for side, model in sides.items():
            start = time.perf_counter()
            call(model)
            if turn:  # The first call allocates memory.
                seconds[side].append(time.perf_counter() - start)
    return {
        **{f"{side} seconds": min(times) for side, times in seconds.items()},
        **{f"{side} all seconds": times for side, times in seconds.items()},
    }


def compare_encoders(
    name: str,
    exact: Any,
    sides: dict[str, Any],
    lengths: tuple[int, ...],
    form: str,
    rounds: int,
) -> dict[str, Any]:
    """Compare the side ``"fastbert"`` with stock fp32, and time all sides in turns.

    Args:
        name: Description of the model and the shape, for the message of an error.
        exact: The stock model in fp32.
        sides: The models by the names of their sides.
        lengths: Length of each sequence.
        form: Format of the weights, a key of `FORMATS`.
        rounds: Number of timed calls of each model.

    Returns:
        The error, and the result of `in_turns`.

    Raises:
        RuntimeError: If the side ``"fastbert"`` does not agree with stock fp32.
    """
    given = batch(lengths)
    real = given["attention_mask"].bool()
    with torch.inference_mode():
        expected = exact(**given).last_hidden_state[real]
        difference = sides["fastbert"](**given).last_hidden_state[real] - expected
        error = float(difference.abs().max())
        require_error(name, error, ERRORS[form])
        return {"error": error, **in_turns(sides, lambda model: model(**given), rounds)}


def peak_of_process() -> int:
    """Return the peak of the resident memory of this process in bytes.

    ``ru_maxrss`` would be no less than the resident memory of the process that started this one.

    Raises:
        RuntimeError: If the system does not report the peak.
    """
    peak = resident_peak()
    if peak is None:
        raise RuntimeError("/proc/self/status: got no VmHWM, allowed: a system that reports it")
    return peak


def parser(doc: str | None, stem: str, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options that these benchmarks share.

    Args:
        doc: Docstring of the benchmark, whose first line describes it.
        stem: Name of the record, and of the folder in ``out/`` by default.
        rounds: Default number of rounds.
    """
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--out", type=Path, default=Path("out") / stem)
    made.add_argument("--rounds", type=int, default=rounds, help="timed rounds of all sides")
    made.add_argument("--threads", type=int, default=os.cpu_count())
    made.add_argument("--quick", action="store_true", help="one layer; the times are no result")
    return made


def write(folder: Path, stem: str, threads: int, content: dict[str, Any], page: str) -> None:
    """Write ``<stem>.json`` with the machine and `content`, and ``<stem>.md`` with `page`."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"machine": dataclasses.asdict(describe()), "threads": threads, **content}
    json_file.write(folder / f"{stem}.json", record, json_file.record)
    (folder / f"{stem}.md").write_text(page, encoding="utf-8")
