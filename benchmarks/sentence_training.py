"""Time of a training step of sentence-transformers with three losses, accelerated and stock.

    python -m benchmarks.sentence_training --out FOLDER [--threads 2] [--rounds 3]

The model is the real MiniLM-L6 with its dropout of 0.1. A step is forward, loss, backward and AdamW
for 32 real queries, each with the passage that answers it; the distillation also has a passage
that does not, and random scores of a teacher. The passages have lengths from 3 to about 200 words.
The tokenizer is not timed. bf16 means autocast with fp32 weights. Stock and accelerated model take
turns, and the table has the shortest of their times. Before they are timed, the loss and the
gradients of the accelerated model are compared with those of stock fp32, without dropout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fastbert
from benchmarks.beside import FORMATS, in_turns, parser, require_error, write
from benchmarks.cpu.tasks import pairs
from fastbert.bench.quantized_accuracy import model_folder

PAIRS = 32
MINI_BATCH = 8
LEARNING_RATE = 2e-5
LOSSES = ("MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss", "MarginMSELoss")
# The largest error of a loss, and of all gradients relative to their norm, against stock fp32.
ERRORS = {"fp32": 1e-3, "bf16": 0.1}
HEADER = """| loss | format | fastbert, ms | sentence-transformers, ms | speed-up |
|---|---|---:|---:|---:|"""


def build(layers: int) -> Any:
    """Return the real MiniLM in fp32, with the first `layers` of its layers."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(model_folder()), device="cpu")
    del model[0].model.encoder.layer[layers:]
    return model


class Batch(NamedTuple):
    """The tokens of the columns of a batch, and the labels or None."""

    columns: list[dict[str, Any]]
    labels: Tensor | None


def batch_of(model: Any, loss: str, count: int) -> Batch:
    """Return a batch of `count` rows for a loss."""
    drawn = pairs(count)
    queries, passages = ([pair[side] for pair in drawn] for side in (0, 1))
    texts = [queries, passages]
    if loss != "MarginMSELoss":
        return Batch([model.preprocess(column) for column in texts], None)
    texts.append([*passages[1:], passages[0]])
    margins = torch.rand(count, generator=torch.Generator().manual_seed(1))
    return Batch([model.preprocess(column) for column in texts], margins)


class Learner:
    """A model with a loss and an optimizer.

    Args:
        model: The model, accelerated or stock.
        loss: A name in `LOSSES`.
        form: Format, a key of `FORMATS`.
    """

    def __init__(self, model: Any, loss: str, form: str) -> None:
        """Create the loss and the optimizer of a model."""
        from sentence_transformers.sentence_transformer import losses

        cached = {"mini_batch_size": MINI_BATCH} if loss.startswith("Cached") else {}
        self.model, self.form = model, form
        self.loss: nn.Module = getattr(losses, loss)(model, **cached)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def gradients(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, and write the gradients of the parameters."""
        self.optimizer.zero_grad()
        columns = [dict(column) for column in batch.columns]
        # The backward of a cached loss computes each mini-batch again, also under autocast.
        with torch.autocast("cpu", torch.bfloat16, enabled=self.form == "bf16"):
            value = self.loss(columns, batch.labels)
            value.backward()
        return value.detach()

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        self.gradients(batch)
        self.optimizer.step()

    def without_dropout(self, batch: Batch) -> tuple[float, Tensor]:
        """Return the loss of a batch and all gradients in one vector, without dropout."""
        self.model.eval()
        value = self.gradients(batch)
        self.model.train()
        present = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(value), torch.cat([gradient.flatten() for gradient in present])


def contest(loss: str, form: str, rounds: int, quick: bool) -> dict[str, Any]:
    """Return the row of a loss in one format.

    Args:
        loss: A name in `LOSSES`.
        form: Format, a key of `FORMATS`.
        rounds: Number of timed steps of each side.
        quick: Whether the model has one layer and the batch is small, so that the times are no
            result.

    Raises:
        RuntimeError: If the accelerated model does not agree with stock fp32.
    """
    layers, count = (1, 4) if quick else (6, PAIRS)
    sides = {
        "stock": Learner(build(layers), loss, form),
        "fastbert": Learner(fastbert.accelerate(build(layers)), loss, form),
    }
    batch = batch_of(sides["stock"].model, loss, count)
    expected, right = Learner(build(layers), loss, "fp32").without_dropout(batch)
    value, gradients = sides["fastbert"].without_dropout(batch)
    loss_error = abs(value - expected)
    gradient_error = float((gradients - right).norm() / right.norm())
    require_error(f"{loss} {form}, loss", loss_error, ERRORS[form])
    require_error(f"{loss} {form}, gradients", gradient_error, ERRORS[form])
    return {
        "loss": loss,
        "format": form,
        "loss_error": loss_error,
        "gradient_error": gradient_error,
        "lengths": [column["attention_mask"].sum(dim=1).tolist() for column in batch.columns],
        **in_turns(sides, lambda side: side.step(batch), rounds),
    }


def row_of(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    own, stock = row["fastbert seconds"], row["stock seconds"]
    times = f"{1e3 * own:,.0f} | {1e3 * stock:,.0f} | {stock / own:.2f} ×"
    return f"| {row['loss']} | {row['format']} | {times} |"


def main() -> None:
    """Measure all losses and formats, and write ``sentence_training.json`` and ``.md``."""
    arguments = parser(__doc__, "sentence_training", 3)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    print(HEADER)
    rows = []
    for loss in LOSSES:
        for form in FORMATS:
            rows.append(contest(loss, form, options.rounds, options.quick))
            print(row_of(rows[-1]), flush=True)
    table = "\n".join([HEADER, *map(row_of, rows), ""])
    write(options.out, "sentence_training", options.threads, {"rows": rows}, table)


if __name__ == "__main__":
    main()
