"""``fastbert encode``: one embedding per line of a file, batched by length under a token budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastbert.cli.common import BACKENDS, ConsoleReporter, one_of, print_summary
from fastbert.jobs import encode as job
from fastbert.jobs.texts import Texts, check_output

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
    reporter = ConsoleReporter()
    texts = Texts(source, (field,), reporter)
    summary = job.run(
        model,
        texts,
        target,
        pooling=pooling,
        normalize=normalize,
        max_length=max_length,
        tokens_per_batch=tokens_per_batch,
        backend=backend,
        reporter=reporter,
    )
    normalised = ", normalised" if summary["normalize"] else ""
    print_summary(summary, f"{summary['shape']}, {summary['pooling']}{normalised}", as_json=as_json)
