"""One pre-training step: forward, backward and fused AdamW, with masked words and next sentence."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.cpu.contest import CpuRow, Setting, first_calls, judge, take_turns
from benchmarks.cpu.remote import Remote
from benchmarks.cpu.runtimes import BF16, BY_NAME, FP32
from fastbert.bench.contest import line
from fastbert.bench.encoder import BASE, SMALL, STOCK, EncoderShape, half_padded
from fastbert.bench.limits import CPU_TARGETS, TRAINING, Target, Work

# The implementations by format, with their names in inference; bf16 is autocast with fp32 weights.
NAMES = {
    BF16: ("fastbert bf16 autocast", "transformers eager bf16", "transformers sdpa bf16"),
    FP32: ("fastbert fp32", "transformers eager fp32", "transformers sdpa fp32"),
}
SHAPE = EncoderShape("BERT-base 8×128 half padded", BASE, half_padded(8, 128))
QUICK = EncoderShape("tiny 2×16 half padded", SMALL, half_padded(2, 16))
# Largest relative difference of first losses that is accepted. Two new models differ only by random
# weights and dropout.
LOSSES_CLOSE = 0.1


def stepper(name: str, config: dict[str, Any], lengths: Sequence[int], threads: int) -> Callable:
    """Return the worker's function of a batch index, which makes one step and returns the loss."""
    import torch

    from benchmarks.cpu.batches import ROTATED
    from fastbert.bench.training_step import training_step
    from fastbert.config import BertConfig

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    engine = BY_NAME[name]
    inner = "fastbert auto" if engine.ours else f"{STOCK}{engine.option}"
    shape = EncoderShape("training", BertConfig.from_dict(config), tuple(lengths))
    dtype = torch.bfloat16 if engine.form == BF16 else torch.float32
    steps = [training_step(inner, shape, seed, "cpu", dtype) for seed in range(ROTATED)]
    return lambda index: steps[index % ROTATED]()


def run(shape: EncoderShape, setting: Setting, threads: int) -> list[CpuRow]:
    """Run bf16 autocast, then fp32; the ratios are to transformers with the same settings."""
    rows: list[CpuRow] = []
    with tempfile.TemporaryDirectory() as folder:
        config = json.dumps(shape.config.to_dict())
        (Path(folder) / "config.json").write_text(config, encoding="utf-8")
        for form, names in NAMES.items():
            setting.notify(f"[{setting.section}] {shape.name}, {form}")
            rows += _play(shape, form, names, Path(folder), setting, threads)
    return rows


def _play(
    shape: EncoderShape,
    form: str,
    names: Sequence[str],
    folder: Path,
    setting: Setting,
    threads: int,
) -> list[CpuRow]:
    rows = {}
    with ExitStack() as stack:
        workers = {}
        for name in names:
            rows[name] = row = CpuRow(
                setting.section, f"training step, {form}", shape.name, "encoder", form, TRAINING,
                name, BY_NAME[name].ours, unit="sequences/s", tokens=shape.tokens,
            )  # fmt: skip
            row.refused = BY_NAME[name].missing()
            if not row.refused:
                workers[name] = stack.enter_context(Remote(name, folder, threads))
        answers = first_calls(
            workers, rows, lambda name: _begin(workers[name], shape), setting.notify
        )
        _compare(answers, rows)
        first = {n: a["seconds"] for n, a in answers.items() if not rows[n].refused}
        take_turns(first, workers, rows, setting.seconds)
    for row in rows.values():
        work = Work(3 * shape.flops)
        row.set_rates(len(shape.lengths), work, setting.ceilings.limits(form))
    target = CPU_TARGETS.get((TRAINING, form), Target())
    judge(list(rows.values()), lambda row: target)
    for row in rows.values():
        setting.notify(f"  {line(row)}")
    return list(rows.values())


def _begin(worker: Remote, shape: EncoderShape) -> dict[str, Any]:
    return worker.ask("training", lengths=list(shape.lengths))


def _compare(answers: dict[str, dict[str, Any]], rows: dict[str, CpuRow]) -> None:
    """Refuse a step whose first loss is not finite or far from the median of the first losses."""
    losses = sorted(a["loss"] for a in answers.values() if math.isfinite(a["loss"]))
    for name, answer in answers.items():
        middle = losses[len(losses) // 2] if losses else math.nan
        if not abs(answer["loss"] - middle) <= LOSSES_CLOSE * abs(middle):
            rows[name].refused = f"its first loss is {answer['loss']:.4g}, the median {middle:.4g}"
