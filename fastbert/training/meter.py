"""Sums of a training loop, which stay on the device so that no step waits for them."""

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
    """Count the tokens of a batch on the CPU, without padding."""
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else int(mask.sum())


class Meter:
    """Sums of losses, correct predictions and tokens between two rows of the log."""

    def __init__(self, device: torch.device) -> None:
        """Start with sums of zero on `device`."""
        # float64 counts tokens exactly, but MPS does not have this dtype.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums = torch.zeros(len(SUMS), dtype=dtype, device=device)

    @torch.no_grad()
    def add(self, output: Any, batch: Batch, tokens: int) -> None:
        """Add the output of a step.

        Args:
            output: Output of the model.
            batch: The batch, on the device.
            tokens: Number of tokens of the batch, without padding.
        """
        wanted = batch["next_sentence_label"]
        hits = (output.seq_relationship_logits.argmax(dim=-1) == wanted).sum()
        values = (1, output.mlm_loss, output.nsp_loss, wanted.numel(), hits, 0, 0, tokens)
        self._sums += torch.stack([self._scalar(value) for value in values])

    @torch.no_grad()
    def add_masked(self, hits: Tensor, labels: Tensor) -> None:
        """Add the correct masked-LM predictions of a step; only logged steps count them."""
        self._sums[SUMS.index("masked")] += (labels != IGNORED).sum()
        self._sums[SUMS.index("mlm_hits")] += hits

    def _scalar(self, value: Tensor | float) -> Tensor:
        return torch.as_tensor(value).detach().to(self._sums)

    def read(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the means of all processes since the last call, and reset the sums.

        Returns:
            Losses and accuracies, and ``tokens``, the number of tokens.
        """
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
