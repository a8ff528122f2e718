"""Compute a row of numbers for each line of INPUT, in packed batches of similar lengths.

The finished rows are kept when the job is interrupted.
"""

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

# Lines are sorted by length inside windows of about this many batches. The rows of a window are
# stored once all of them are computed.
WINDOW_BATCHES = 8


class LimitedTokenizer:
    """The tokenizer of a model folder, for texts and pairs, with a limit of tokens.

    The attribute ``limit`` is ``settings.max_length``, or the maximum in
    ``tokenizer_config.json``, but at most `positions`. The tokenizer puts ``settings.prompt``
    before the first text. A call takes a tuple of one text or two, and returns an ``Encoded``.

    Args:
        settings: The settings of the model folder.
        positions: Number of positions of the model.

    Raises:
        ValueError: In a call, if a text has no tokens or if the tokenizer refuses the text.
    """

    def __init__(self, settings: SentenceFolder, positions: int) -> None:
        """Load the tokenizer; warn if the folder has prompts and none of them is the default."""
        from fastbert.data import load_tokenizer, model_max_length

        self.folder, self.prompt = settings.encoder, settings.prompt
        if settings.other_prompts:
            names = ", ".join(settings.other_prompts)
            warnings.warn(
                f"MODEL has prompts, but no default prompt ({names}): texts are encoded without a "
                "prompt",
                stacklevel=2,
            )
        self.tokenizer: WordPieceTokenizer | JsonTokenizer = load_tokenizer(self.folder)
        if settings.lowercase:
            self.tokenizer.lowercase()
        limit = settings.max_length or model_max_length(self.folder) or positions
        self.limit = min(limit, positions)

    def __call__(self, texts: tuple[str, ...]) -> Encoded:
        """Encode a text or a pair, with the prompt and cut to the limit."""
        first, *second = texts
        try:
            encoded = self.tokenizer.encode_within(self.limit, self.prompt + first, *second)
        except ValueError as error:
            raise ValueError(f"MODEL: {self.folder}: {error}") from error
        if not encoded.ids:
            raise ValueError(
                f"MODEL: its tokenizer makes no tokens of {first!r:.200}, allowed: at least one"
            )
        return encoded

    def prompt_length(self) -> int:
        """Return the number of tokens of the prompt at the start of each text.

        The count is that of sentence-transformers: the tokens of the prompt alone, without a
        special token at the end.
        """
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
        fingerprint: The facts on which the rows depend, from `fingerprint`.
        write: Called as ``write(rows, path)`` with all rows, fp32 of shape ``(count, width)``. None
            writes a .npy file.
        reporter: Receives notes and progress.

    Returns:
        The summary: the numbers of texts and tokens, the seconds, the tokens per second of this
        run, and others.

    Raises:
        ValueError: If INPUT changed while it was read, or if another run is writing to OUT.
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
    """Cut consecutive lines into windows.

    Args:
        lines: The encoded lines.
        tokens: A window ends as soon as it has this many tokens.

    Yields:
        The windows in order.
    """
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
    """Group texts of similar lengths into batches, the longest first.

    Args:
        lengths: Number of tokens of each text.
        tokens_per_batch: Largest number of tokens of a batch, unless a single text is longer.

    Returns:
        The indices of the texts of each batch.

    Examples:
        >>> from fastbert.jobs.batch_job import length_batches
        >>> length_batches([3, 9, 5, 3], tokens_per_batch=8)
        [[1], [2, 0], [3]]
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
    """Pack encoded lines into the arguments of a model, without padding.

    Args:
        lines: The encoded lines, at least one.
        device: Device of the tensors.

    Returns:
        ``input_ids``, int64 of shape ``(T,)``; ``cu_seqlens``, int32 of shape ``(B + 1,)``;
        ``max_seqlen``; and ``token_type_ids``, int64 of shape ``(T,)``, if a line has token types.
    """
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
    """Collect the facts on which the rows of a job depend.

    Args:
        folders: The folders of the model, whose files are digested.
        texts: The lines of INPUT.
        options: Options of the job.

    Returns:
        The digests of the folders and the texts, the options, the machine and the versions of the
        packages.
    """
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
    """Return a digest of all files from which a model, its tokenizer or its modules may be read."""
    from fastbert.io import checkpoint

    digest = hashlib.sha256()
    patterns = (*checkpoint.DOWNLOADED, checkpoint.PICKLED)
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        digest.update(f"{path.relative_to(folder)}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
