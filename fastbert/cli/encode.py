"""``fastbert encode``: one embedding per line of a file, batched by length under a token budget."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastbert.cli.common import BACKENDS, one_of
from fastbert.cli.rows import LimitedTokenizer, compute, fingerprint, print_summary
from fastbert.cli.texts import Texts, blocks, check_output, write_parquet

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

POOLINGS = ("mean", "cls", "max", "last")


def encode(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder (or hub id) of a checkpoint.")
    ],
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help=".txt (a text per line), .jsonl or .parquet.")
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help=".npy (a float32 row per line) or .parquet (column embedding)."
        ),
    ],
    field: Annotated[
        str, typer.Option(help="Field of the .jsonl or column of the .parquet with the text.")
    ] = "text",
    pooling: Annotated[
        str | None,
        typer.Option(
            help="mean, cls, max or last; the folder's own 1_Pooling/config.json, else mean."
        ),
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
    """Turn each line of INPUT into an embedding; row i of OUT is line i, blank lines too.

    OUT holds the embeddings and nothing else. It appears when it is whole;
    until then OUT.partial keeps what is done, and after an interruption the
    same command goes on from there.
    """
    one_of("--backend", backend, BACKENDS)
    one_of("--pooling", pooling, POOLINGS)
    check_output(target, source, (".npy", ".parquet"))
    texts = Texts(source, (field,))
    from fastbert.io import checkpoint

    folder = checkpoint.find(model)
    recipe = Recipe.of(folder)
    recipe = Recipe(
        pooling or recipe.checked_pooling(),
        recipe.normalize if normalize is None else normalize,
        max_length or recipe.max_length,
    )
    summary = run(folder, texts, target, recipe, tokens_per_batch=tokens_per_batch, backend=backend)
    detail = f"{summary['shape']}, {recipe.pooling}{', normalised' if recipe.normalize else ''}"
    print_summary(summary, detail, as_json=as_json)


@dataclass(frozen=True)
class Recipe:
    """How token vectors become one vector. ``max_length`` None: as long as the model allows."""

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
        prefix = "pooling_mode_"
        flags = [key.removeprefix(prefix) for key, on in config.items() if on]
        mode = [key for key in flags if f"{prefix}{key}" in config] or ["mean"]
    modes = [mode] if isinstance(mode, str) else mode
    names = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "lasttoken": "last"}
    return "+".join(names.get(name, name) for name in modes)


def run(
    folder: Path,
    texts: Texts,
    target: Path,
    recipe: Recipe,
    *,
    tokens_per_batch: int,
    backend: str | None,
) -> dict[str, Any]:
    """Encodes ``texts`` and writes ``target``; returns the summary that ``--json`` prints."""
    import torch

    from fastbert.modules import BertModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with warnings.catch_warnings():
        # A checkpoint without a pooler is as good as any here: nothing reads the pooler's output.
        warnings.filterwarnings("ignore", ".*initialised afresh: pooler")
        model = BertModel.from_pretrained(folder, backend=backend).to(device)
    config = model.config
    tokenizer = LimitedTokenizer(folder, recipe.max_length, config.max_length)
    options = {"pooling": recipe.pooling, "normalize": recipe.normalize}
    summary = compute(
        texts,
        target,
        tokenizer=tokenizer,
        forward=lambda batch: pooled(model(**batch).last_hidden_state, batch["cu_seqlens"], recipe),
        width=config.hidden_size,
        tokens_per_batch=tokens_per_batch,
        device=device,
        fingerprint=fingerprint(
            folder,
            texts,
            command="encode",
            **options,
            max_length=tokenizer.limit,
            tokens_per_batch=tokens_per_batch,
            backend=backend,
        ),
        write=None if target.suffix.lower() == ".npy" else write_embeddings,
    )
    return {**summary, "shape": (texts.count, config.hidden_size), **options}


def pooled(hidden: torch.Tensor, cu_seqlens: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Token vectors (T, H) of packed texts to one float32 vector each, (B, H)."""
    import torch

    from fastbert.modules import pool

    rows = pool(hidden.float(), cu_seqlens, recipe.pooling)
    return torch.nn.functional.normalize(rows, dim=-1) if recipe.normalize else rows


def write_embeddings(rows: NDArray[np.float32], path: Path) -> None:
    """A .parquet with the column ``embedding``, a fixed-size list of float32."""
    import pyarrow as pa

    schema = pa.schema({"embedding": pa.list_(pa.float32(), rows.shape[1])})

    def batches() -> Iterator[Any]:
        for block in blocks(rows):
            column = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), rows.shape[1])
            yield pa.record_batch([column], schema=schema)

    write_parquet(path, schema, batches())
