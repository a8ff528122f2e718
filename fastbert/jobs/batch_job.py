"""A row of numbers for each line of INPUT: packed batches by length, kept across interruptions."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.jobs.partial_output import PartialOutput
from fastbert.jobs.reporter import Reporter
from fastbert.jobs.texts import Texts
from fastbert.version import __version__

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from fastbert.data import Encoded, JsonTokenizer, WordPieceTokenizer
    from fastbert.io.sentence_transformers_folder import SentenceFolder

# Lines are sorted by length, and kept once computed, in windows of about this many batches.
WINDOW_BATCHES = 8


class LimitedTokenizer:
    """The tokenizer of a model folder, for texts and pairs, with the model's limit of tokens.

    The limit is ``settings.max_length``, or what tokenizer_config.json says, but never more than
    the ``positions`` that the model has. ``settings.prompt`` is put before the first text.
    """

    def __init__(self, settings: SentenceFolder, positions: int) -> None:
        from fastbert.data import load_tokenizer, model_max_length

        self.folder, self.prompt = settings.encoder, settings.prompt
        if settings.other_prompts:
            names = ", ".join(settings.other_prompts)
            warnings.warn(
                f"MODEL has prompts, and none of them by default ({names}): texts are read as they "
                "are",
                stacklevel=2,
            )
        self.tokenizer: WordPieceTokenizer | JsonTokenizer = load_tokenizer(self.folder)
        if settings.lowercase:
            self.tokenizer.lowercase()
        limit = settings.max_length or model_max_length(self.folder) or positions
        self.limit = min(limit, positions)

    def __call__(self, texts: tuple[str, ...]) -> Encoded:
        first, *second = texts
        try:
            encoded = self.tokenizer.encode_within(self.limit, self.prompt + first, *second)
        except ValueError as error:
            raise ValueError(f"MODEL: {self.folder}: {error}") from error
        if not encoded.ids:
            raise ValueError(
                f"MODEL: its tokenizer makes no tokens of {first!r:.200}, allowed: some"
            )
        return encoded

    def prompt_length(self) -> int:
        """The tokens at the start of each text that are the prompt's, as sentence-transformers
        counts them: those of the prompt alone without a special token at the end."""
        if not self.prompt:
            return 0
        ids = self.tokenizer.encode_within(self.limit, self.prompt).ids
        return len(ids) - self.tokenizer.is_added(ids[-1]) if ids else 0


def compute(
    texts: Texts,
    target: Path,
    *,
    tokenizer: LimitedTokenizer,
    forward: Callable[[dict[str, Any]], torch.Tensor],
    width: int,
    tokens_per_batch: int,
    device: torch.device,
    fingerprint: dict[str, Any],
    write: Callable[[NDArray[np.float32], Path], None] | None,
    reporter: Reporter,
) -> dict[str, Any]:
    """Writes OUT from ``forward(batch)``, (B, width) for a packed batch of B; the summary of it.

    A run with the same ``fingerprint`` that was stopped is resumed at the window where it stopped.
    ``write(rows, path)`` turns all rows (count, width) into OUT; None: as a .npy.
    """
    import numpy as np
    import torch

    digest = texts.digest
    with PartialOutput(target, (texts.count, width), fingerprint, reporter) as partial:
        resumed, tokens_before = partial.done, partial.totals["tokens"]
        start = time.perf_counter()
        with reporter.progress(texts.count, resumed) as advance, torch.inference_mode():
            encoded = map(tokenizer, islice(texts, resumed, None))
            for window in windows(encoded, WINDOW_BATCHES * tokens_per_batch):
                rows = np.empty((len(window), width), dtype=np.float32)
                for batch in length_batches([len(line.ids) for line in window], tokens_per_batch):
                    values = forward(pack([window[i] for i in batch], device))
                    rows[batch] = values.float().cpu().numpy()
                    advance(len(batch))
                partial.append(
                    rows,
                    tokens=sum(len(line.ids) for line in window),
                    truncated=sum(line.truncated for line in window),
                )
        seconds = time.perf_counter() - start
        if (texts.digest, partial.done) != (digest, texts.count):
            partial.discard()
            raise ValueError(f"INPUT: {texts.path} changed while it was read, allowed: no change")
        partial.finish(write)
    tokens = partial.totals["tokens"]
    return {
        "output": target,
        "max_length": tokenizer.limit,
        "texts": texts.count,
        "truncated": partial.totals["truncated"],
        "resumed": resumed,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": (tokens - tokens_before) / seconds,
        "device": device.type,
    }


def windows(lines: Iterable[Encoded], tokens: int) -> Iterator[list[Encoded]]:
    """Consecutive lines, cut as soon as they hold ``tokens`` tokens."""
    window: list[Encoded] = []
    held = 0
    for line in lines:
        window.append(line)
        held += len(line.ids)
        if held >= tokens:
            yield window
            window, held = [], 0
    if window:
        yield window


def length_batches(lengths: list[int], tokens_per_batch: int) -> list[list[int]]:
    """Indices grouped by length, longest first.

    A batch holds at most ``tokens_per_batch`` tokens, or a single longer text.
    """
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or room < lengths[index]:
            batches.append([])
            room = tokens_per_batch
        batches[-1].append(index)
        room -= lengths[index]
    return batches


def pack(lines: list[Encoded], device: torch.device) -> dict[str, Any]:
    """The arguments of a model's forward pass without any padding."""
    import torch

    lengths = torch.tensor([0, *(len(line.ids) for line in lines)], device=device)
    batch = {
        "input_ids": torch.tensor([i for line in lines for i in line.ids], device=device),
        "cu_seqlens": lengths.cumsum(0).int(),
        "max_seqlen": max(len(line.ids) for line in lines),
    }
    if any(line.token_types for line in lines):
        types = [t for line in lines for t in line.token_types or [0] * len(line.ids)]
        batch["token_type_ids"] = torch.tensor(types, device=device)
    return batch


def fingerprint(folders: tuple[Path, ...], texts: Texts, **options: Any) -> dict[str, Any]:
    """What the rows depend on: the files of the model's ``folders``, the texts, ``options``,
    versions, machine."""
    from fastbert.bench.machine import describe

    machine = describe()
    versions = {name: machine.versions.get(name) for name in ("torch", "triton", "tokenizers")}
    return {
        "model": [_digest_of_model(folder) for folder in dict.fromkeys(folders)],
        "input": texts.digest,
        **options,
        "machine": [machine.isa, machine.gpu],
        "versions": {"fastbert": __version__, **versions},
    }


def _digest_of_model(folder: Path) -> str:
    """A digest of every file that a model, its tokenizer or its modules may be read from."""
    from fastbert.io import checkpoint

    digest = hashlib.sha256()
    patterns = (*checkpoint.DOWNLOADED, checkpoint.PICKLED)
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        digest.update(f"{path.relative_to(folder)}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
