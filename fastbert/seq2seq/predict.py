"""The targets that a trained model writes for texts, or for the lines of a file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastbert.inference.text_batches import length_batches
from fastbert.io import checkpoint
from fastbert.jobs import batch_job
from fastbert.jobs.partial_output import PartialOutput
from fastbert.jobs.reporter import SILENT, Reporter
from fastbert.jobs.texts import Texts
from fastbert.modules.transformer import Transformer
from fastbert.seq2seq.evaluate import TOKENS_PER_BATCH, generate
from fastbert.seq2seq.tokenizer import PieceTokenizer


class Writer:
    """A trained encoder–decoder with its tokenizer; a call returns the targets of texts.

    Attributes:
        folder: Folder of the model.
        longest: Largest number of tokens of a source, with the token at its end.
        padding: Id that fills a target after its end.

    Args:
        model: Folder of a model that `train` wrote, such as ``out/model``.
        num_beams: Number of beams of the search; None takes the setting of the model, which is
            greedy search after `train`.
        backend: Backend that the model asks for; None lets each operation choose.

    Raises:
        FileNotFoundError: If there is no model or no tokenizer.
        ValueError: If an option is not allowed, or if the model is damaged or of another kind.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        num_beams: int | None = None,
        backend: str | None = None,
    ) -> None:
        """Load the model, on an accelerator if there is one."""
        self.folder = checkpoint.find(model)
        self.device = torch.accelerator.current_accelerator() or torch.device("cpu")
        self._model = Transformer.from_pretrained(self.folder, backend=backend).to(self.device)
        self._tokenizer = PieceTokenizer.load(self.folder)
        config = self._model.config
        if self._tokenizer.size > min(config.vocab_size, config.decoder_vocab_size or 0):
            raise ValueError(
                f"model: the tokenizer of {self.folder} has {self._tokenizer.size} ids, allowed: "
                f"vocab_size ({config.vocab_size})"
            )
        # Raises ValueError if the number of beams is not allowed.
        self._model.generation.replace(num_beams=num_beams)
        self.num_beams, self.backend = num_beams, backend
        self.longest: int = config.max_position_embeddings
        self.padding: int = config.pad_token_id

    def __call__(self, texts: Sequence[str]) -> list[str]:
        """Return the target of each text.

        Raises:
            ValueError: If a text has too many pieces.
        """
        sources = self.encode(texts)
        rows: list[list[int]] = [[] for _ in sources]
        for indices, batch in self.written(sources):
            for index, row in zip(indices, batch, strict=True):
                rows[index] = row
        return [self.decode(row) for row in rows]

    def encode(self, texts: Iterable[str], place: str = "texts") -> list[list[int]]:
        """Return the ids of each text.

        Args:
            texts: The texts.
            place: Name of the texts, for messages.

        Raises:
            ValueError: If a text has too many pieces; the message has its number, from 1.
        """
        sources = self._tokenizer.encode(list(texts))
        for number, source in enumerate(sources, 1):
            if len(source) > self.longest:
                raise ValueError(
                    f"{place}: text {number} has {len(source) - 1} pieces, allowed: at most "
                    f"{self.longest - 1}, the positions of {self.folder}"
                )
        return sources

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids of a target."""
        return self._tokenizer.decode(ids)

    def written(
        self, sources: Sequence[Sequence[int]]
    ) -> Iterable[tuple[list[int], list[list[int]]]]:
        """Yield the indices of the sources of each batch, and the ids of their targets."""
        for batch in length_batches([len(source) for source in sources], TOKENS_PER_BATCH):
            chosen = [sources[i] for i in batch]
            yield batch, generate(self._model, chosen, self.device, self.num_beams)


def predict(
    writer: Writer, texts: Texts, target: Path, *, reporter: Reporter = SILENT
) -> dict[str, Any]:
    """Write the target of each line of a file to a .jsonl file.

    Each line of the output is an object with the ``target``, and the ``id`` if the texts have ids.
    The file appears when it is complete. Until then, a folder with the suffix ``.partial`` stores
    the finished lines. If the call is interrupted, the same call continues after these lines.

    Args:
        writer: The model.
        texts: The lines of INPUT, with one text each.
        target: Path of OUT, the file that the job writes.
        reporter: Receives notes and progress.

    Returns:
        The ``output``, the number of ``texts``, and ``resumed``, the number of lines that an
        earlier run had computed.

    Raises:
        ValueError: If a text has too many pieces, if INPUT changed while it was read, or if another
            run is writing to OUT.
    """
    digest = texts.digest
    with reporter.reading(texts.path):
        sources = writer.encode((text for (text,) in texts), f"INPUT: {texts.path}")
    facts = batch_job.fingerprint(
        (writer.folder,),
        texts,
        command="seq2seq predict",
        num_beams=writer.num_beams,
        backend=writer.backend,
    )

    def write(rows: NDArray[np.float32], path: Path) -> None:
        ids = texts.ids() if texts.id_field else None
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                own = {} if ids is None else {"id": next(ids)}
                line = {**own, "target": writer.decode(row.astype(np.int64).tolist())}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    # A row has the ids of a target, which are exact in fp32. Its end is filled with padding.
    with PartialOutput(target, (len(sources), writer.longest), facts, reporter) as partial:
        resumed = partial.done
        _compute(writer, sources[resumed:], partial, reporter)
        if texts.digest != digest:
            partial.discard()
            raise ValueError(f"INPUT: {texts.path} changed while it was read, allowed: no change")
        partial.finish(write)
    return {"output": target, "texts": len(sources), "resumed": resumed}


def _compute(
    writer: Writer, sources: Sequence[list[int]], partial: PartialOutput, reporter: Reporter
) -> None:
    """Append the targets of the sources that `partial` lacks to `partial`."""
    total, tokens = partial.shape[0], batch_job.WINDOW_BATCHES * TOKENS_PER_BATCH
    with reporter.progress(total, partial.done) as advance:
        for window in batch_job.windows(sources, tokens, len):
            rows = np.full((len(window), partial.shape[1]), writer.padding, dtype=np.float32)
            for indices, batch in writer.written(window):
                rows[indices, : len(batch[0])] = batch
                advance(len(indices))
            partial.append(rows)
