"""Sums of a training loop, which stay on the device so that no step waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastbert.training import checkpoints
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
        # These are sums of numbers that the CPU knows; a copy of each number to the device would
        # wait for the device.
        self._known = dict.fromkeys(("batches", "pairs", "tokens"), 0)

    def count(self, batch: Batch) -> None:
        """Count a batch, its pairs, and its tokens without padding.

        Args:
            batch: The batch, on the CPU.
        """
        self._known["batches"] += 1
        if "next_sentence_label" in batch:
            self._known["pairs"] += batch["next_sentence_label"].numel()
        self._known["tokens"] += token_count(batch)

    @torch.no_grad()
    def add(self, output: Any, batch: Batch) -> None:
        """Add the output of a step; a CUDA graph may record this method.

        Args:
            output: Output of the model.
            batch: The batch, on the device.
        """
        if "next_sentence_label" not in batch:
            self._add("mlm_loss", output.loss)
            return
        wanted = batch["next_sentence_label"]
        hits = (output.seq_relationship_logits.argmax(dim=-1) == wanted).sum()
        self._add("mlm_loss", output.mlm_loss)
        self._add("nsp_loss", output.nsp_loss)
        self._add("nsp_hits", hits)

    @torch.no_grad()
    def add_masked(self, hits: Tensor, labels: Tensor) -> None:
        """Add the correct masked-LM predictions of a step; only logged steps call this method."""
        self._add("masked", (labels != IGNORED).sum())
        self._add("mlm_hits", hits)

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[SUMS.index(name)] += value.detach()

    def state(self) -> Tensor:
        """Return the sums of this process since the last `read`, on the device."""
        self._merge()
        return self._sums.clone()

    def restore(self, sums: Tensor) -> None:
        """Continue with sums that `state` returned."""
        checkpoints.check_like("sums", sums, self._sums)
        self._sums.copy_(sums)

    def _merge(self) -> None:
        for name, number in self._known.items():
            self._sums[SUMS.index(name)] += number
            self._known[name] = 0

    def read(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the means over all processes since the last call, and reset the sums.

        Returns:
            ``mlm_loss`` and ``mlm_accuracy``; if there were pairs, ``nsp_loss`` and
            ``nsp_accuracy``; and ``tokens``, the number of tokens.
        """
        self._merge()
        total = accelerator.reduce(self._sums, reduction="sum")
        sums = dict(zip(SUMS, total.tolist(), strict=True))
        self._sums.zero_()
        means = {
            "mlm_loss": sums["mlm_loss"] / sums["batches"],
            "mlm_accuracy": sums["mlm_hits"] / max(1.0, sums["masked"]),
        }
        if sums["pairs"]:
            means["nsp_loss"] = sums["nsp_loss"] / sums["batches"]
            means["nsp_accuracy"] = sums["nsp_hits"] / sums["pairs"]
        return {**means, "tokens": sums["tokens"]}
