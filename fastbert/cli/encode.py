"""``fastbert encode``: one embedding per line of a file, batched by length under a token budget."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastbert.cli.common import BACKENDS, one_of
from fastbert.jobs.batch_job import LimitedTokenizer, compute, fingerprint, print_summary
from fastbert.jobs.texts import Texts, blocks, check_output, write_parquet

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fastbert.io.sentence_transformers_folder import SentenceFolder

# Spelled out, because importing fastbert.modules would import torch; a test compares the two.
POOLINGS = ("mean", "cls", "max", "last", "mean_sqrt_len_tokens", "weightedmean")


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
            help=f"{', '.join(POOLINGS)}; by default the folder's own Pooling, else mean."
        ),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            help="End with rows of length 1; by default as the folder's modules.json says."
        ),
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

    A folder of sentence-transformers is followed as a whole: its Pooling,
    Dense and Normalize, its default prompt, its limit of tokens. A folder with
    another module or setting is refused.

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
    recipe = read_recipe(folder, pooling=pooling, normalize=normalize, max_length=max_length)
    summary = run(folder, texts, target, recipe, tokens_per_batch=tokens_per_batch, backend=backend)
    normalised = ", normalised" if summary["normalize"] else ""
    print_summary(summary, f"{summary['shape']}, {summary['pooling']}{normalised}", as_json=as_json)


def read_recipe(
    folder: Path,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    max_length: int | None = None,
) -> SentenceFolder:
    """What makes an embedding: of a sentence-transformers folder what it says, of any other the
    mean of the rows; each argument that is not None replaces that part.

    Raises ValueError naming the file and what is damaged or not served.
    """
    from fastbert.io import sentence_transformers_folder as stored

    recipe = stored.SentenceFolder(folder, (stored.Pooling(),))
    if stored.is_one(folder):
        recipe = stored.read(folder)
    first, *others = recipe.modules
    if pooling is not None and isinstance(first, stored.Pooling):
        first = replace(first, modes=(pooling,))
    ends_normalised = bool(others) and isinstance(others[-1], stored.Normalize)
    if normalize is True and not ends_normalised:
        others.append(stored.Normalize())
    elif normalize is False and ends_normalised:
        others.pop()
    return replace(recipe, modules=(first, *others), max_length=max_length or recipe.max_length)


def run(
    folder: Path,
    texts: Texts,
    target: Path,
    recipe: SentenceFolder,
    *,
    tokens_per_batch: int,
    backend: str | None,
) -> dict[str, Any]:
    """Encodes ``texts`` and writes ``target``; returns the summary that ``--json`` prints."""
    import torch

    from fastbert.jobs.after_encoder import AfterEncoder
    from fastbert.modules import BertModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with warnings.catch_warnings():
        # A checkpoint without a pooler is as good as any here: nothing reads the pooler's output.
        warnings.filterwarnings("ignore", ".*initialised afresh: pooler")
        model = BertModel.from_pretrained(recipe.encoder, backend=backend).to(device)
    config = model.config
    tokenizer = LimitedTokenizer(recipe, config.max_length)
    after = AfterEncoder(recipe, config.hidden_size, tokenizer.prompt_length()).to(device)
    options = {"pooling": "+".join(after.pooling.modes), "normalize": after.normalised}
    summary = compute(
        texts,
        target,
        tokenizer=tokenizer,
        forward=lambda batch: after(model(**batch).last_hidden_state, batch["cu_seqlens"]),
        width=after.width,
        tokens_per_batch=tokens_per_batch,
        device=device,
        fingerprint=fingerprint(
            (folder, recipe.encoder, *after.folders),
            texts,
            command="encode",
            **options,
            max_length=tokenizer.limit,
            tokens_per_batch=tokens_per_batch,
            backend=backend,
        ),
        write=None if target.suffix.lower() == ".npy" else write_embeddings,
    )
    return {**summary, "shape": (texts.count, after.width), **options}


def write_embeddings(rows: NDArray[np.float32], path: Path) -> None:
    """A .parquet with the column ``embedding``, a fixed-size list of float32."""
    import pyarrow as pa

    schema = pa.schema({"embedding": pa.list_(pa.float32(), rows.shape[1])})

    def batches() -> Iterator[Any]:
        for block in blocks(rows):
            column = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), rows.shape[1])
            yield pa.record_batch([column], schema=schema)

    write_parquet(path, schema, batches())
