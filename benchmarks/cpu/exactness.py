"""The exactness of each implementation: its embeddings of real sentences against float64.

The published MiniLM turns real sentences into embeddings (``fastbert.bench.quantized_accuracy``).
Each worker gets the same padded batches of token ids, and returns the mean of the hidden states of
each sentence, scaled to length 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks.cpu.batches import Batch

Embeddings = Sequence[Sequence[float]]  # one row per sentence

BATCH = 32
SENTENCES = 128


def padded(ids: Sequence[Sequence[int]]) -> Iterator[Batch]:
    """Yield batches of int64 input_ids and attention_mask (B, L) in the order of the sentences."""
    for start in range(0, len(ids), BATCH):
        part = ids[start : start + BATCH]
        longest = max(map(len, part))
        mask = np.arange(longest) < np.asarray([len(sentence) for sentence in part])[:, None]
        drawn = np.zeros(mask.shape, dtype=np.int64)
        drawn[mask] = np.concatenate([np.asarray(sentence) for sentence in part])
        yield {"input_ids": drawn, "attention_mask": mask.astype(np.int64)}


def pooled(hidden: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the mean of the hidden states (B, L, H) at real tokens, scaled to length 1."""
    mask = batch["attention_mask"].astype(np.float64)[:, :, None]
    mean = np.where(mask, hidden, 0.0).sum(1) / mask.sum(1)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


def fields(actual: Embeddings, right: Embeddings) -> dict[str, float]:
    """Return the fields of a `CpuRow` that describe the exactness of an implementation."""
    import torch

    from fastbert.bench.quantized_accuracy import errors

    actual, right = (torch.tensor(rows, dtype=torch.float64) for rows in (actual, right))
    found = errors("", actual, "", right)
    return {
        "embedding_error": found["max_error"],
        "rank_correlation": found["spearman"],
        "same_nearest": found["top_1"],
    }


class Exactness:
    """The sentences of a run and their embeddings in float64."""

    def __init__(self) -> None:
        """Compute the embeddings, or raise ModuleNotFoundError if the model is not installed."""
        import torch

        from fastbert.bench.quantized_accuracy import (
            embeddings,
            model_folder,
            real_sentences,
            token_ids,
        )
        from fastbert.modules import BertModel

        model = BertModel.from_pretrained(
            model_folder(), dtype=torch.float64, backend="reference"
        ).eval()
        # Sentences of similar lengths come together, so that the batches have little padding.
        sentences = sorted(real_sentences(SENTENCES), key=len)
        self.ids = token_ids(sentences)
        self._right = embeddings(model, sentences)

    def errors(self, embeddings: Embeddings) -> dict[str, float]:
        return fields(embeddings, self._right.tolist())
