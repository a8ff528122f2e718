"""``fastbert encode``: one embedding for each line of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fastbert.cli.common import (
    BACKENDS,
    ConsoleReporter,
    one_of,
    out,
    print_json,
    print_summary,
)
from fastbert.jobs import encode as job
from fastbert.jobs import encode_on_ray as job_on_ray
from fastbert.jobs.texts import Texts, check_output

# These are copies of the names in fastbert.modules and fastbert.inference, because an import of
# these packages would import torch. A test compares the copies.
POOLINGS = ("mean", "cls", "max", "last", "mean_sqrt_len_tokens", "weightedmean")
COMBINATIONS = ("concat", "sum", "mean")


def encode(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder (or hub id) of a checkpoint.")
    ],
    source: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="A .txt with one text per line, a .jsonl, a .csv, a .tsv or a .parquet; with "
            "--ray a folder of such files.",
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="A .npy with one float32 row per line, or a .parquet with the column embedding, "
            "and id with --id-field; with --ray a folder.",
        ),
    ],
    field: Annotated[
        str, typer.Option(help="Field of the .jsonl, or column of another file, that has the text.")
    ] = "text",
    id_field: Annotated[
        str | None,
        typer.Option(help="Field or column of ids, texts or integers, which OUT then has as id."),
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(help="Pooling mode, listed above; by default the folder's mode, else mean."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…",
            help="Layers whose token vectors are pooled; 0 is the embedding output, and negative "
            "numbers count from the last layer; by default the last layer.",
        ),
    ] = None,
    combine: Annotated[
        str | None,
        typer.Option(
            help="How the vectors of several layers become one: concat, sum or mean; by default "
            "concat."
        ),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            help="Scale the embeddings to L2 norm 1, or not; by default as the folder says."
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Cut a text to this number of tokens, \\[CLS] and \\[SEP] included; "
            "by default the limit of the model.",
            min=3,
        ),
    ] = None,
    tokens_per_batch: Annotated[
        int, typer.Option(help="Largest number of tokens of a batch.", min=1)
    ] = 8192,
    backend: Annotated[
        str | None,
        typer.Option(help="reference, triton, cuda or cpu; by default each operation chooses."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="auto|ADDRESS",
            help="Compute on a Ray cluster: the running one, else a new one on this machine, or "
            "the one at ADDRESS.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a summary as JSON on stdout.")
    ] = False,
) -> None:
    """Write one embedding for each line of INPUT to OUT.

    Row i of OUT belongs to line i of INPUT. Blank lines of a .txt count, too; the
    first line of a .csv or .tsv has the names of the columns and does not count.

    A folder of sentence-transformers is followed as a whole: its Pooling, Dense
    and Normalize modules, its default prompt and its limit of tokens. A folder
    with another module or setting is refused. --pooling takes mean, cls, max,
    last, mean_sqrt_len_tokens or weightedmean.

    --layers 9,10,11,12 pools the token vectors of the last four layers of a
    model with twelve layers, and --combine says how they become one vector.

    OUT has the embeddings, the ids of --id-field, and nothing else. It appears when it is complete;
    until then OUT.partial keeps the finished rows. After an interruption, the
    same command continues from these rows.

    With --ray, OUT is a folder with NAME.parquet for each file NAME of the
    folder INPUT. A file appears when it is complete, and the same command
    computes the missing files.
    """
    one_of("--backend", backend, BACKENDS)
    one_of("--pooling", pooling, POOLINGS)
    one_of("--combine", combine, COMBINATIONS)
    options = {
        "pooling": pooling,
        "layers": _numbers("--layers", layers),
        "combine": combine,
        "normalize": normalize,
        "max_length": max_length,
        "tokens_per_batch": tokens_per_batch,
        "backend": backend,
    }
    if ray is not None:
        _encode_on_ray(model, source, target, ray, field, id_field, options, as_json=as_json)
        return
    check_output(target, source, (".npy", ".parquet"))
    if id_field is not None and target.suffix.lower() == ".npy":
        raise ValueError(
            f"--id-field: got {id_field!r} and OUT in .npy, which has no ids; allowed: OUT in "
            ".parquet"
        )
    reporter = ConsoleReporter()
    texts = Texts(source, (field,), reporter, id_field)
    summary = job.run(model, texts, target, reporter=reporter, **options)
    of_layers = f", layers {layers}" if layers is not None else ""
    normalised = ", normalised" if summary["normalize"] else ""
    detail = f"{summary['shape']}, {summary['pooling']}{of_layers}{normalised}"
    print_summary(summary, detail, as_json=as_json)


def _numbers(argument: str, text: str | None) -> tuple[int, ...] | None:
    """Return the integers in `text`, which are separated by commas; None if `text` is None."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        allowed = "numbers of layers separated by commas, such as 9,10,11,12"
        raise ValueError(f"{argument}: got {text!r}, allowed: {allowed}") from None


def _encode_on_ray(
    model: str,
    source: Path,
    target: Path,
    address: str,
    field: str,
    id_field: str | None,
    options: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    reporter = ConsoleReporter()
    chosen = {"address": address, "field": field, "id_field": id_field, **options}
    summary = job_on_ray.run(model, source, target, reporter=reporter, **chosen)
    if as_json:
        print_json(summary)
        return
    out.print(
        f"{summary['texts']:,} texts of {summary['files']:,} files in {summary['seconds']:.1f} s "
        f"({summary['texts_per_second']:,.0f} texts/s) → {summary['output']}",
        highlight=False,
        soft_wrap=True,
    )
