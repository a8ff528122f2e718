"""Compute a row of numbers for each line of INPUT, in packed batches of similar lengths.

INPUT and OUT are the file arguments of the command. Finished rows stay on the disk when the job is
interrupted.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fastbert.jobs.partial_output import PartialOutput
from fastbert.jobs.reporter import Reporter
from fastbert.jobs.texts import Texts
from fastbert.version import __version__

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from fastbert.inference.text_batches import LimitedTokenizer

# Lines are sorted by length inside windows of about this many batches. The rows of a window are
# stored once all of them are computed.
WINDOW_BATCHES = 8

Line = TypeVar("Line")


class Digested(Protocol):
    """An input of a job that has a digest, such as `Texts`."""

    @property
    def digest(self) -> str:
        """The SHA-256 of the input."""


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
    """Compute a row for each line of INPUT and write all rows to OUT.

    If a run with the same `fingerprint` was stopped, the job resumes at the window where that run
    stopped.

    Args:
        texts: The lines of INPUT.
        target: The path of OUT.
        tokenizer: Encodes the texts of a line.
        forward: Computes the rows of a packed batch of B lines, of shape ``(B, width)``.
        width: Number of values of a row.
        tokens_per_batch: Largest number of tokens of a batch, unless a single line is longer.
        device: Device of the batches.
        fingerprint: The facts on which the rows depend, from the function `fingerprint`.
        write: Called as ``write(rows, path)`` with all rows, fp32 of shape ``(count, width)``. None
            writes a .npy file.
        reporter: Receives notes and progress.

    Returns:
        The summary: the numbers of texts and tokens, the duration in seconds, the tokens per second
        of this run, and other entries.

    Raises:
        ValueError: If INPUT changed while it was read, or if another run is writing to OUT.
    """
    import numpy as np
    import torch

    from fastbert.inference.text_batches import length_batches, pack

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


def _tokens_of(line: Any) -> int:
    return len(line.ids)


def windows(
    lines: Iterable[Line], tokens: int, tokens_of: Callable[[Line], int] = _tokens_of
) -> Iterator[list[Line]]:
    """Cut consecutive lines into windows.

    Args:
        lines: The encoded lines.
        tokens: A window ends as soon as it has at least this number of tokens.
        tokens_of: Function that returns the number of tokens of a line; the default returns the
            length of ``line.ids``.

    Yields:
        The windows in order.
    """
    window: list[Line] = []
    held = 0
    for line in lines:
        window.append(line)
        held += tokens_of(line)
        if held >= tokens:
            yield window
            window, held = [], 0
    if window:
        yield window


def fingerprint(folders: tuple[Path, ...], texts: Digested, **options: Any) -> dict[str, Any]:
    """Collect the facts on which the rows of a job depend.

    Args:
        folders: The folders of the model, whose files are digested.
        texts: The lines of INPUT, of which only the digest is read.
        options: Options of the job.

    Returns:
        The digests of the folders and the texts, the options, the machine and the versions of the
        packages.
    """
    from fastbert.machine import describe

    machine = describe()
    versions = {name: machine.versions.get(name) for name in ("torch", "triton", "tokenizers")}
    return {
        "model": [digest_of_model(folder) for folder in dict.fromkeys(folders)],
        "input": texts.digest,
        **options,
        "machine": [machine.isa, machine.gpu],
        "versions": {"fastbert": __version__, **versions},
    }


def digest_of_model(folder: Path) -> str:
    """Compute a digest of all files from which a model, its tokenizer or its modules may be read.

    Args:
        folder: Folder of the model.

    Returns:
        The SHA-256 digest of the names, sizes and contents.
    """
    from fastbert.io import checkpoint

    digest = hashlib.sha256()
    patterns = (*checkpoint.DOWNLOADED, checkpoint.PICKLED)
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        digest.update(f"{path.relative_to(folder)}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
