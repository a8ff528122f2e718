"""Inference of the encoder in each implementation, from padded ids to padded hidden states."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.cpu.ceilings import Ceilings
from benchmarks.cpu.contest import LEFT_OUT, CpuRow, Setting, judge, padded_flops, play
from benchmarks.cpu.exactness import Exactness
from benchmarks.cpu.remote import ROOT, Failed, Remote
from benchmarks.cpu.runtimes import BF16, CALIBRATION, ONNX, RUNTIMES, WEIGHTS, Runtime
from fastbert.bench.contest import line
from fastbert.bench.encoder import (
    BASE,
    MINILM,
    SMALL,
    EncoderShape,
    half_padded,
    random_weights,
)
from fastbert.bench.limits import CPU_TARGETS, Target
from fastbert.bench.quantized_accuracy import model_folder, real_sentences, token_ids
from fastbert.config import BertConfig
from fastbert.modules import BertModel

FULL, HALF, ONE = "full", "half padded", "one sequence"
EXPORT_LIMIT_S = 300
# OpenVINO's int8 model is calibrated on this many real sentences.
CALIBRATED = 128


@dataclass(frozen=True)
class Scale:
    """A model, its batches (B, L) to run full and half padded, and lengths of single sequences.

    A published scale has the weights of the real MiniLM; other scales have random weights.
    """

    name: str
    config: BertConfig
    batches: tuple[tuple[int, int], ...]
    single: tuple[int, ...]
    published: bool = False


BATCHES, SINGLE = ((8, 128), (4, 512)), (32, 128)
SCALES = {
    "bert-base": Scale("BERT-base", BASE, BATCHES, SINGLE),
    "minilm": Scale("MiniLM-L6", MINILM, BATCHES, SINGLE, published=True),
}
QUICK = Scale("tiny", SMALL, ((4, 32),), (16,))


@dataclass(frozen=True)
class Match:
    kind: str
    shape: EncoderShape


def matches(scale: Scale) -> list[Match]:
    """Return the shapes of a model to time.

    Single sequences come first, because short calls show early which implementations are slow.
    """
    listed = []
    for length in scale.single:
        shape = EncoderShape(f"{scale.name} 1×{length}", scale.config, (length,))
        listed.append(Match(ONE, shape))
    for batch, length in scale.batches:
        name = f"{scale.name} {batch}×{length}"
        for kind, lengths in ((FULL, (length,) * batch), (HALF, half_padded(batch, length))):
            listed.append(Match(kind, EncoderShape(f"{name} {kind}", scale.config, lengths)))
    return listed


def target_of(row: CpuRow, match: Match) -> Target:
    """Return the floor and the goal of a row of fastbert, if it has any."""
    return CPU_TARGETS.get((match.kind, row.dtype), Target())


def flops_to_do(scale: Scale) -> float:
    return sum(padded_flops(match.shape) for match in matches(scale))


def run(scale: Scale, setting: Setting, threads: int, names: Sequence[str] = ()) -> list[CpuRow]:
    """Run all shapes of one model; an empty ``names`` means every implementation."""
    wanted = [e for e in RUNTIMES if not names or e.name in names]
    rows: list[CpuRow] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        refused = prepare(Path(folder), scale, wanted, setting, left_out)
        runners = [engine for engine in wanted if engine.name not in refused]
        started = [stack.enter_context(Remote(e.name, Path(folder), threads)) for e in runners]
        # Nothing is timed yet, so imports, parity checks and builds may share the cores.
        with ThreadPoolExecutor(threads) as pool:
            admitted = list(pool.map(admit, started, [engine.ours for engine in runners]))
        workers, notes = {}, {}
        for worker, (note, reason) in zip(started, admitted, strict=True):
            if reason is None:
                workers[worker.engine], notes[worker.engine] = worker, note
            else:
                refused[worker.engine] = reason
                worker.close()
        for name, reason in refused.items():
            setting.notify(f"  {name}: {reason}")
        exact = _exactness(workers, setting) if scale.published else {}
        for match in matches(scale):
            setting.notify(f"[{setting.section}] {match.shape.name}")
            results = play(match.shape, scale.name, workers, refused, notes, setting)
            judge(results, lambda row, match=match: target_of(row, match))
            rows += results
            for row in results:
                for name, value in exact.get(row.contender, {}).items():
                    setattr(row, name, value)
                setting.notify(f"  {line(row)}")
    return rows


def _exactness(workers: Mapping[str, Remote], setting: Setting) -> dict[str, dict[str, float]]:
    """Return the fields of `CpuRow` that describe the exactness of each implementation."""
    exactness, result = Exactness(), {}
    for name, worker in workers.items():
        try:
            vectors = worker.ask("embed", ids=exactness.ids)["embeddings"]
        except Failed as failure:
            setting.notify(f"  {name}: no embeddings: {failure}")
            continue
        result[name] = exactness.errors(vectors)
        found = ", ".join(f"{key} {value:.5f}" for key, value in result[name].items())
        setting.notify(f"  {name}: {found}")
    return result


def admit(worker: Remote, ours: bool) -> tuple[str | None, str | None]:
    """Check and build an implementation; return (note, None), or (None, reason for the refusal)."""
    try:
        if ours and (reason := worker.ask("gate")["refused"]):
            return None, reason
        return worker.ask("load")["note"], None
    except Failed as failure:
        return None, str(failure)


def prepare(
    folder: Path,
    scale: Scale,
    wanted: Sequence[Runtime],
    setting: Setting,
    left_out: Callable[[Runtime, Setting], str | None],
) -> dict[str, str]:
    """Write the model to ``folder``; return the reason for each implementation that cannot run.

    ``left_out`` returns the reason why a section leaves an implementation out, or None.
    """
    refused = {e.name: reason for e in wanted if (reason := e.missing() or left_out(e, setting))}
    (folder / "config.json").write_text(json.dumps(scale.config.to_dict()), encoding="utf-8")
    torch.save(weights_of(scale), folder / WEIGHTS)
    ids = [
        [number % scale.config.vocab_size for number in sentence]
        for sentence in token_ids(real_sentences(CALIBRATED))
    ]
    (folder / CALIBRATION).write_text(json.dumps(ids), encoding="utf-8")
    for kind in dict.fromkeys(engine.kind for engine in wanted):
        users = [e for e in wanted if e.kind == kind and e.reads and e.name not in refused]
        if not users:
            continue
        setting.notify(
            f"[{setting.section}] converting for {', '.join(engine.name for engine in users)}"
        )
        # The quantized models of ONNX are made from the first one.
        first = [ONNX] if kind == "onnxruntime" else []
        reason = export(folder, list(dict.fromkeys([*first, *(e.reads for e in users)])))
        absent = [e.name for e in users if not (folder / e.reads).exists()]
        refused |= dict.fromkeys(absent, f"conversion failed: {reason}")
    return refused


def weights_of(scale: Scale) -> dict[str, torch.Tensor]:
    """Return the weights of the published checkpoint of a scale, or random weights."""
    if not scale.published:
        return random_weights(scale.config)
    return BertModel.from_pretrained(model_folder(), backend="reference").state_dict()


def left_out(engine: Runtime, setting: Setting) -> str | None:
    """Return the reason to leave out an implementation that compiles for minutes, or None."""
    if engine.kind != "compiled":
        return None
    if setting.section == "minilm":
        return f"{LEFT_OUT}it is compiled for BERT-base only, whose targets include it"
    return slow_bf16(setting.ceilings) if engine.form == BF16 else None


def slow_bf16(ceilings: Ceilings) -> str | None:
    """Return the reason to leave out bf16 in torch, if it is slower than half of fp32's speed."""
    fp32, bf16 = ceilings.torch_fp32, ceilings.torch_bf16
    if bf16 > fp32 / 2:
        return None
    return (
        f"{LEFT_OUT}bf16 products of torch reach {bf16 / 1e9:.0f} GFLOP/s here, "
        f"and fp32 products {fp32 / 1e9:.0f} GFLOP/s"
    )


def export(folder: Path, names: Sequence[str]) -> str | None:
    """Convert the model in another process; return the reason if a conversion fails, or None."""
    command = [sys.executable, "-m", "benchmarks.cpu.export", str(folder), *names]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=EXPORT_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"it takes longer than {EXPORT_LIMIT_S} s"
    return " ".join(done.stderr.split())[-300:] if done.returncode else None
