"""Compare replays of CUDA graphs of inference and training steps with calls without graphs.

    python -m benchmarks.gpu.first.graphs

The program prints a JSON object for each comparison, with the differences that are too large. With
``--rehearse``, it runs on the CPU, where a replay calls the recorded function again.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastbert import BertConfig, BertForPreTraining
from fastbert.graphs.buckets import Buckets
from fastbert.graphs.recording import Recorder, cuda_recorder
from fastbert.inference.graphed_model import GraphedModel
from fastbert.training import GraphedStep

MARK = "graphs"
BUCKETS = Buckets(max_tokens=512, max_batch=8, max_seqlen=128)
# All batches have the same bucket, so that later calls replay the graph of an earlier call.
LENGTHS = ((100, 60, 30), (90, 80, 20), (70, 70, 50), (96, 95, 1))
CLIP = 1.0
# Largest relative and absolute difference that is accepted. Results differ because a matrix product
# in a graph may use another algorithm.
TOLERANCE = 2e-2


class Again:
    """A recorder whose recordings call their function again, for a machine without a GPU."""

    def run(self, function: Callable[[], Any]) -> Any:
        return function()

    def record(self, function: Callable[[], Any]) -> Any:
        return Latest(function)

    def turn(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Return at once, because every call on the CPU has already ended."""


class Latest:
    """A recording of `Again`, with the result of the last call."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function, self.result = function, None

    def replay(self) -> None:
        self.result = self.function()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, without a GPU")
    rehearsal = parser.parse_args().rehearse
    device = torch.device("cpu" if rehearsal else "cuda")
    if rehearsal:
        torch.set_num_threads(1)

    def recorder(there: torch.device) -> Recorder:
        return Again() if rehearsal else cuda_recorder(there, "graphs")

    failed = False
    for name, compare in COMPARISONS.items():
        start = time.monotonic()
        try:
            faults = compare(made(device), recorder)
        except Exception as error:
            faults = [f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"]
        failed = failed or bool(faults)
        said = {MARK: name, "faults": faults, "seconds": round(time.monotonic() - start, 2)}
        print(json.dumps(said), flush=True)
    return 1 if failed else 0


def made(device: torch.device) -> BertForPreTraining:
    """Return a model of two layers with dropout, in training mode."""
    torch.manual_seed(0)
    small = device.type == "cpu"
    config = BertConfig.preset(
        "tiny" if small else "mini", vocab_size=1000, num_hidden_layers=2, initializer_range=0.05
    )
    return BertForPreTraining(config).to(device).train()


def batch_of(lengths: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Return a packed batch with labels at every seventh token."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    ids = torch.randint(5, 1000, (sum(lengths),))
    labels = torch.where(torch.arange(len(ids)) % 7 == 0, ids, -100)
    pairs = torch.arange(len(lengths)) % 2
    there = {"input_ids": ids, "cu_seqlens": ends, "labels": labels, "next_sentence_label": pairs}
    moved = {name: tensor.to(device) for name, tensor in there.items()}
    return {**moved, "max_seqlen": max(lengths)}


def padded(batch: dict[str, Any], lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Return a packed batch as padded ids and mask (B, L), on the device of the batch."""
    device = batch["input_ids"].device
    mask = torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.int64, device=device)
    return {"input_ids": ids.masked_scatter(mask, batch["input_ids"]), "attention_mask": mask}


Recorders = Callable[[torch.device], Recorder]


def inference(model: BertForPreTraining, recorder: Recorders) -> list[str]:
    """Compare hidden states of replays with those of plain calls, on packed and padded batches."""
    encoder = model.bert.eval()
    graphs = GraphedModel(encoder, BUCKETS, 8, recorder)
    faults = []
    for lengths in LENGTHS:
        batch = batch_of(lengths, model.device)
        packed = {name: batch[name] for name in ("input_ids", "cu_seqlens", "max_seqlen")}
        for name, given in (("packed", packed), ("padded", padded(batch, lengths))):
            with torch.no_grad():
                expected = encoder(**given).last_hidden_state
            got = graphs(**given).last_hidden_state
            if not torch.allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE):
                faults.append(f"{name} {lengths}: {largest(got, expected)}")
    return faults


def largest(got: Tensor, expected: Tensor) -> str:
    return f"largest difference {(got - expected).abs().max().item():.3g}"


def training(model: BertForPreTraining, recorder: Recorders, mixed: bool = False) -> list[str]:
    """Compare losses and gradient norms of replays with eager steps at the same dropout seeds."""
    eager = copy.deepcopy(model)
    own, graphed = optimizer_of(eager), optimizer_of(model)
    step = GraphedStep(model, graphed, BUCKETS, 8, recorder, clip_norm=CLIP)
    faults = []
    for number, lengths in enumerate(LENGTHS * 2):
        batch = batch_of(lengths, model.device)
        for optimizer in (own, graphed):
            optimizer.param_groups[0]["lr"].fill_(1e-3 / (1 + number))
        with torch.autocast(model.device.type, torch.bfloat16, enabled=mixed):
            torch.manual_seed(number)
            got = step(**batch)
            torch.manual_seed(number)
            loss = eager(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(eager.parameters(), CLIP)
        own.step()
        own.zero_grad()
        for name, a, b in (("loss", got.loss, loss), ("norm", got.gradient_norm, norm)):
            if not torch.allclose(a, b.detach(), rtol=TOLERANCE, atol=TOLERANCE):
                faults.append(f"step {number}: {name} {a.item():.5f}, plainly {b.item():.5f}")
    graphed.param_groups[0]["lr"].zero_()
    if len({step(**batch).loss.item() for _ in range(4)}) < 4:
        faults.append("replays draw the same dropout masks")
    if not step.recorded:
        faults.append("no step was recorded")
    return faults


def optimizer_of(model: BertForPreTraining) -> torch.optim.Optimizer:
    rate = torch.tensor(1e-3, device=model.device)
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)


COMPARISONS: dict[str, Callable[[BertForPreTraining, Recorders], list[str]]] = {
    "inference": inference,
    "training": training,
    "training, bf16 autocast": lambda model, recorder: training(model, recorder, mixed=True),
}


if __name__ == "__main__":
    sys.exit(main())
