"""Running sums of a training loop, kept on the device so that a step never waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastbert.training.evaluate import IGNORED, Batch

if TYPE_CHECKING:
    from accelerate import Accelerator

SUMS = (
    "batches", "mlm_loss", "nsp_loss", "pairs", "nsp_hits", "masked", "mlm_hits", "tokens"
)  # fmt: skip


def token_count(batch: Batch) -> int:
    """Real tokens of a batch that still lies on the CPU; padding is not counted."""
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else int(mask.sum())


class Meter:
    """Sums losses, hits and tokens between two rows of the log, over all processes."""

    def __init__(self, device: torch.device) -> None:
        # float64 counts tokens exactly; MPS alone has none.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums = torch.zeros(len(SUMS), dtype=dtype, device=device)

    @torch.no_grad()
    def add(self, output: Any, batch: Batch, tokens: int) -> None:
        """Takes in a step's output; ``batch`` lies on the device, ``tokens`` are its real ones."""
        wanted = batch["next_sentence_label"]
        hits = (output.seq_relationship_logits.argmax(dim=-1) == wanted).sum()
        values = (1, output.mlm_loss, output.nsp_loss, wanted.numel(), hits, 0, 0, tokens)
        self._sums += torch.stack([self._scalar(value) for value in values])

    @torch.no_grad()
    def add_masked(self, hits: Tensor, labels: Tensor) -> None:
        """Takes in the masked-LM hits of a step, which are counted at log steps only."""
        self._sums[SUMS.index("masked")] += (labels != IGNORED).sum()
        self._sums[SUMS.index("mlm_hits")] += hits

    def _scalar(self, value: Tensor | float) -> Tensor:
        return torch.as_tensor(value).detach().to(self._sums)

    def read(self, accelerator: Accelerator) -> dict[str, float]:
        """Means since the last call, and the number of tokens; starts again at zero."""
        total = accelerator.reduce(self._sums, reduction="sum")
        sums = dict(zip(SUMS, total.tolist(), strict=True))
        self._sums.zero_()
        return {
            "mlm_loss": sums["mlm_loss"] / sums["batches"],
            "nsp_loss": sums["nsp_loss"] / sums["batches"],
            "mlm_accuracy": sums["mlm_hits"] / max(1.0, sums["masked"]),
            "nsp_accuracy": sums["nsp_hits"] / sums["pairs"],
            "tokens": sums["tokens"],
        }
