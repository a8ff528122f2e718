"""``fastbert encode``: one embedding per line of a file, batched by length under a token budget."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fastbert.cli.common import (
    BACKENDS,
    err,
    one_of,
    out,
    print_json,
    write_atomically,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

POOLINGS = ("mean", "cls")


def encode(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder (or hub id) of a checkpoint.")
    ],
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help=".txt (a text per line) or .jsonl (field text).")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help=".npy to write: float32, a row per line.")
    ],
    pooling: Annotated[
        str | None,
        typer.Option(help="mean or cls; the folder's own 1_Pooling/config.json, else mean."),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(help="Scale rows to length 1; as the folder's modules.json says, else not."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens kept of a text, \\[CLS] and \\[SEP] included.", min=3)
    ] = None,
    tokens_per_batch: Annotated[int, typer.Option(help="Token budget of a batch.", min=1)] = 8192,
    backend: Annotated[
        str | None, typer.Option(help="reference, triton, cuda or cpu; chosen if not given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON.")] = False,
) -> None:
    """Turn each line of INPUT into an embedding; row i of OUT is line i, blank lines too."""
    one_of("--backend", backend, BACKENDS)
    one_of("--pooling", pooling, POOLINGS)
    if target.suffix != ".npy":
        raise ValueError(f"OUT: got {str(target)!r}, allowed: a name that ends in .npy")
    texts = list(read_lines(source))
    if not texts:
        raise ValueError(f"INPUT: {str(source)!r} has no lines, allowed: at least one")
    from fastbert.io import checkpoint

    folder = checkpoint.find(model)
    recipe = Recipe.of(folder)
    recipe = Recipe(
        pooling or recipe.checked_pooling(),
        recipe.normalize if normalize is None else normalize,
        max_length or recipe.max_length,
    )
    summary = run(folder, texts, target, recipe, tokens_per_batch=tokens_per_batch, backend=backend)
    if as_json:
        print_json(summary)
        return
    out.print(
        f"{summary['texts']:,} texts, {summary['tokens']:,} tokens in {summary['seconds']:.1f} s "
        f"({summary['tokens_per_second']:,.0f} tokens/s) → {target} "
        f"{tuple(summary['shape'])}, {recipe.pooling}{', normalised' if recipe.normalize else ''}",
        highlight=False,
        soft_wrap=True,
    )
    if summary["truncated"]:
        err.print(
            f"note: {summary['truncated']:,} texts were cut to {summary['max_length']} tokens"
        )


@dataclass(frozen=True)
class Recipe:
    """How token vectors become one vector. ``max_length`` None: as long as the position table."""

    pooling: str = "mean"
    normalize: bool = False
    max_length: int | None = None

    @classmethod
    def of(cls, model: Path) -> Recipe:
        """What a sentence-transformers folder says of itself; the defaults for any other."""
        if not (model / "modules.json").is_file():
            return cls()
        kinds = {entry["type"].rsplit(".", 1)[-1]: entry for entry in _read(model / "modules.json")}
        pooling = "mean"
        if "Pooling" in kinds:
            pooling = _pooling_mode(_read(model / kinds["Pooling"]["path"] / "config.json"))
        length = None
        if (model / "sentence_bert_config.json").is_file():
            length = _read(model / "sentence_bert_config.json").get("max_seq_length")
        return cls(pooling, "Normalize" in kinds, length)

    def checked_pooling(self) -> str:
        """Raises ValueError for a pooling that sentence-transformers has and fastbert has not."""
        if self.pooling not in POOLINGS:
            raise ValueError(
                f"MODEL: its pooling is {self.pooling!r}, allowed: {', '.join(POOLINGS)} "
                "(--pooling overrides it)"
            )
        return self.pooling


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"MODEL: {path} is not valid JSON: {error}") from error


def _pooling_mode(config: dict[str, Any]) -> str:
    """The mode of a Pooling module: one key today, one flag per mode in older folders."""
    mode = config.get("pooling_mode")
    if mode is None:
        names = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max"}
        prefix = "pooling_mode_"
        mode = [
            names.get(key.removeprefix(prefix), key.removeprefix(prefix))
            for key, wanted in config.items()
            if key.startswith(prefix) and wanted
        ] or ["mean"]
    return mode if isinstance(mode, str) else "+".join(mode)


def read_lines(path: Path) -> Iterator[str]:
    """The texts of ``path``: its lines, or the field ``text`` of each object of a .jsonl.

    Raises FileNotFoundError, or ValueError naming the line.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"INPUT: got {str(path)!r}, allowed: a .txt or .jsonl file")
    with path.open(encoding="utf-8-sig", newline=None) as file:
        for number, line in enumerate(file, 1):
            if path.suffix == ".txt":
                yield line.rstrip("\n")
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise ValueError(
                    f"INPUT: {path}, line {number}: expected an object with a string field text"
                )
            yield text


def run(
    model: Path,
    texts: list[str],
    target: Path,
    recipe: Recipe,
    *,
    tokens_per_batch: int,
    backend: str | None,
) -> dict[str, Any]:
    """Encodes ``texts`` and writes ``target``; returns the summary that ``--json`` prints."""
    import numpy as np
    import torch

    from fastbert.data import WordPieceTokenizer
    from fastbert.modules import BertModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with warnings.catch_warnings():
        # A checkpoint without a pooler is as good as any here: nothing reads the pooler's output.
        warnings.filterwarnings("ignore", ".*initialised afresh: pooler")
        encoder = BertModel.from_pretrained(model, backend=backend).to(device)
    limit = min(recipe.max_length or 1 << 30, encoder.config.max_position_embeddings)
    ids, truncated = tokenize(WordPieceTokenizer.load(model), texts, limit)
    start = time.perf_counter()
    rows = embed(encoder, ids, recipe, tokens_per_batch)
    seconds = time.perf_counter() - start
    write_atomically(target, lambda temporary: np.save(temporary, rows))
    tokens = sum(map(len, ids))
    return {
        "output": target,
        "shape": rows.shape,
        "pooling": recipe.pooling,
        "normalize": recipe.normalize,
        "max_length": limit,
        "texts": len(texts),
        "truncated": truncated,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "device": device,
    }


def tokenize(tokenizer: Any, texts: list[str], limit: int) -> tuple[list[list[int]], int]:
    """Ids of each text, cut to ``limit`` with [SEP] kept last, and how many had to be cut."""
    ids = [tokenizer.encode(text) for text in texts]
    truncated = sum(len(row) > limit for row in ids)
    return [row if len(row) <= limit else [*row[: limit - 1], row[-1]] for row in ids], truncated


def length_batches(lengths: list[int], tokens_per_batch: int) -> list[list[int]]:
    """Indices grouped by length, longest first (what runs out of memory does so at once).

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


def embed(
    encoder: Any, ids: list[list[int]], recipe: Recipe, tokens_per_batch: int
) -> NDArray[np.float32]:
    """Embeddings (len(ids), hidden) float32 in the order of ``ids``; a progress bar on stderr."""
    import numpy as np
    import torch

    rows = np.empty((len(ids), encoder.config.hidden_size), dtype=np.float32)
    device = next(encoder.parameters()).device
    columns = (TextColumn("encode"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err) as progress, torch.inference_mode():
        task = progress.add_task("encode", total=len(ids))
        for batch in length_batches([len(row) for row in ids], tokens_per_batch):
            rows[batch] = _embed_batch(encoder, [ids[i] for i in batch], recipe, device)
            progress.advance(task, len(batch))
    return rows


def _embed_batch(
    encoder: Any, ids: list[list[int]], recipe: Recipe, device: torch.device
) -> NDArray[np.float32]:
    """One packed forward pass: no padding anywhere."""
    import torch

    lengths = torch.tensor([len(row) for row in ids], device=device)
    ends = lengths.cumsum(0)
    cu_seqlens = torch.cat([ends.new_zeros(1), ends]).int()
    flat = torch.tensor([token for row in ids for token in row], device=device)
    hidden = encoder(
        input_ids=flat, cu_seqlens=cu_seqlens, max_seqlen=max(map(len, ids))
    ).last_hidden_state.float()
    if recipe.pooling == "cls":
        rows = hidden[cu_seqlens[:-1].long()]
    else:
        rows = torch.segment_reduce(hidden, "mean", lengths=lengths)
    if recipe.normalize:
        rows = torch.nn.functional.normalize(rows, dim=-1)
    return rows.cpu().numpy()
