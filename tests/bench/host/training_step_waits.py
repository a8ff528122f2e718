"""Run training steps on the mocked GPU, and print which operators wait, for ``test_host.py``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mocked_cuda
import torch

mocked_cuda.activate()

from fastbert.config import BertConfig  # noqa: E402
from fastbert.graphs.buckets import Buckets  # noqa: E402
from fastbert.graphs.recording import Recording  # noqa: E402
from fastbert.modules import BertForPreTraining  # noqa: E402
from fastbert.training.evaluate import to_device  # noqa: E402
from fastbert.training.graphs import GraphedStep  # noqa: E402
from fastbert.training.meter import Meter  # noqa: E402

config = BertConfig(
    num_hidden_layers=1, hidden_size=64, num_attention_heads=1, intermediate_size=128,
    vocab_size=100,
)  # fmt: skip
with torch.device("cuda"):
    model = BertForPreTraining(config)
device = torch.device("cuda")
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(5, 100, (3, 20))
mask = torch.arange(20) < torch.tensor([[20], [9], [12]])
labels = torch.where(torch.arange(20) % 6 == 0, ids, -100)
common = {"next_sentence_label": torch.zeros(3, dtype=torch.int64)}
ends = torch.tensor([0, 20, 29, 41], dtype=torch.int32)
batches = {
    "padded": {"input_ids": ids, "attention_mask": mask, "labels": labels, **common},
    "packed": {
        "input_ids": ids[mask], "cu_seqlens": ends, "max_seqlen": 20, "labels": labels[mask],
        **common,
    },
}  # fmt: skip
meter = Meter(device)
waits = {}
for _ in range(2):
    for name, batch in batches.items():
        mocked_cuda.waits()
        meter.count(batch)
        moved = to_device(batch, device)
        with torch.autocast("cuda", torch.bfloat16):
            output = model(**moved)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        meter.add(output, moved)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        waits[name] = mocked_cuda.waits()


class Calls:
    """A substitute for a graph recorder, whose replay calls the recorded function again."""

    def __init__(self, device: torch.device) -> None:
        self.replayed = 0

    def run(self, function: Callable[[], Any]) -> Any:
        return function()

    def record(self, function: Callable[[], Any]) -> Recording:
        result = function()

        def replay() -> None:
            self.replayed += 1
            mocked_cuda.waits()
            function()
            inside.extend(mocked_cuda.waits())

        return Recording(replay, result)

    def turn(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


means = meter.read(SimpleNamespace(reduce=lambda x, reduction: x))
assert means["tokens"] == 4 * 41, means

inside: list[str] = []
rate = torch.tensor(1e-3, device=device)
optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
step = GraphedStep(
    model, optimizer, Buckets(512, 8, 512), 8, Calls, clip_norm=1.0, observe=meter.add
)
for _ in range(3):
    for name, batch in batches.items():
        moved = to_device(batch, device)
        mocked_cuda.waits()
        with torch.autocast("cuda", torch.bfloat16):
            step(**moved)
        waits[f"graphed, {name}"] = mocked_cuda.waits()
assert step._cache.recorder.replayed == 4
assert len(step.recorded) == 2
print(json.dumps(waits | {"inside a graph": inside}))
mocked_cuda.leave()
