"""Embeddings of texts in Ray Data: a callable class for ``Dataset.map_batches``."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastbert.inference import Embedder


class Embed:
    """Adds a column of embeddings to the batches of a Ray data set.

    Ray makes one instance in each worker, so each worker loads the model once. The instance divides
    a batch of Ray into packed batches of texts with similar lengths.

    Args:
        model: Folder or hub id of a checkpoint, which every machine of the cluster can read.
        field: Name of the column that contains the texts.
        options: The keyword arguments of `fastbert.inference.Embedder`.

    Raises:
        ValueError: As in `fastbert.inference.Embedder`.

    Examples:
        >>> import ray  # doctest: +SKIP
        >>> from fastbert.integrations.ray import Embed
        >>> texts = ray.data.read_parquet("texts/")  # doctest: +SKIP
        >>> workers = ray.data.ActorPoolStrategy(size=2)  # doctest: +SKIP
        >>> arguments = {"fn_constructor_args": ("out/demo/model",), "batch_size": 256}
        >>> texts.map_batches(Embed, compute=workers, **arguments)  # doctest: +SKIP
    """

    def __init__(self, model: str, field: str = "text", **options: Any) -> None:
        """Load the model."""
        self.embedder, self.field = Embedder(model, **options), field

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with the column ``embedding``.

        Args:
            batch: Columns of N values. The column `field` contains texts.

        Returns:
            The columns of `batch`, and the column ``embedding``, fp32 of shape ``(N, E)`` for
            vectors of E elements.

        Raises:
            ValueError: If `batch` has no column `field`, or if a value in it is not a text.
        """
        if self.field not in batch:
            raise ValueError(f"field: got {self.field!r}, allowed: {', '.join(batch)}")
        texts = list(batch[self.field])
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise ValueError(f"{self.field}: got {wrong[0]!r:.200}, allowed: texts")
        return {**batch, "embedding": np.asarray(self.embedder(texts))}
