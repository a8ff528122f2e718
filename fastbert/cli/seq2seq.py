"""``fastbert seq2seq``: an encoder–decoder that writes a target text for a source text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fastbert.cli.arguments import option, typed_text
from fastbert.cli.common import (
    BACKENDS,
    ConsoleReporter,
    FriendlyGroup,
    err,
    is_first_process,
    new_table,
    one_of,
    out,
    print_json,
)
from fastbert.cli.pretrain import parse_overrides

if TYPE_CHECKING:
    from fastbert.seq2seq import Seq2SeqResult

DATA, MODEL, RUN = "Data", "Model", "Run"

seq2seq = typer.Typer(
    cls=FriendlyGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Train an encoder–decoder on pairs of texts, and write the targets of other texts.",
)


def _typed_texts(parameter: typer.CallbackParam, texts: list[str] | None) -> list[str | None]:
    return [typed_text(parameter, text) for text in texts or ()]


# The defaults are copies of the defaults of Seq2SeqOptions, because an import of Seq2SeqOptions
# would import torch for --help. A test compares the copies.
@seq2seq.command(epilog="Example: [bold]fastbert seq2seq train --task numbers -o out/numbers[/]")
def train(
    output: Annotated[
        Path,
        option(
            RUN,
            "Folder for model/, metrics.json, log.jsonl, curves.png, checkpoints/.",
            "-o",
            "--out",
        ),
    ] = Path("seq2seq"),
    task: Annotated[
        str | None,
        option(
            DATA,
            "Built-in task: numbers (words to digits), hyphens (joins the two lines of a divided "
            "word), or reverse (writes a text backwards); by default numbers.",
        ),
    ] = None,
    pairs: Annotated[
        Path | None,
        option(DATA, "File of pairs instead: a .csv, .tsv, .jsonl or .parquet."),
    ] = None,
    source_field: Annotated[
        str, option(DATA, "Column or field of PAIRS that has the source.")
    ] = "source",
    target_field: Annotated[
        str, option(DATA, "Column or field of PAIRS that has the target.")
    ] = "target",
    corpus: Annotated[
        Path | None,
        option(
            DATA,
            "File or folder of text, as for pretrain, for hyphens and reverse; by default the text "
            "of Python's help().",
        ),
    ] = None,
    held_out: Annotated[
        float, option(DATA, "Fraction of the data that is held out for the evaluation.")
    ] = 0.02,
    merges: Annotated[
        int | None,
        option(
            DATA,
            "Merges of neighbouring pieces (byte-pair encoding); with 0, each byte is a piece; by "
            "default that of the task, or 2000 for PAIRS.",
        ),
    ] = None,
    max_length: Annotated[
        int, option(DATA, "Largest number of pieces of a text; longer pairs are left out.")
    ] = 64,
    config: Annotated[
        list[str] | None,
        option(MODEL, "A field of TransformerConfig as KEY=VALUE; may be repeated."),
    ] = None,
    overwrite: Annotated[
        bool, option(RUN, "Start anew and replace an earlier run in OUT.", "--overwrite")
    ] = False,
    epochs: Annotated[
        int | None,
        option(RUN, "Number of epochs; by default that of the task, or 10 for PAIRS."),
    ] = None,
    batch_size: Annotated[int, option(RUN, "Number of pairs of a batch.")] = 64,
    learning_rate: Annotated[float, option(RUN, "Peak of the learning rate.")] = 2e-3,
    warmup: Annotated[float, option(RUN, "Fraction of the steps in which the rate rises.")] = 0.1,
    weight_decay: Annotated[float, option(RUN, "Decay of matrices and tables.")] = 0.01,
    clip_norm: Annotated[float, option(RUN, "Largest L2 norm of the gradient.")] = 1.0,
    precision: Annotated[str, option(RUN, "fp32, or bf16 for autocast to bf16.")] = "fp32",
    seed: Annotated[int, option(RUN, "Seed of the pairs, the weights and dropout.")] = 0,
    backend: Annotated[
        str | None,
        option(RUN, "reference, triton, cuda or cpu; by default each operation chooses."),
    ] = None,
    eval_every: Annotated[
        int | None,
        option(RUN, "Steps between two evaluations; by default one after each epoch."),
    ] = None,
    log_every: Annotated[int, option(RUN, "Steps between two rows of the log.")] = 50,
    save_every: Annotated[
        int | None, option(RUN, "Steps between two checkpoints; by default one after each epoch.")
    ] = None,
    save_minutes: Annotated[
        float | None, option(RUN, "Largest number of minutes between two checkpoints.")
    ] = None,
    keep_checkpoints: Annotated[int, option(RUN, "Checkpoints that stay in OUT/checkpoints.")] = 2,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON on stdout.")
    ] = False,
) -> None:
    """Train a small encoder–decoder, and count the held-out targets that it writes exactly.

    Without options, it learns to write number words as digits, in a few minutes on two cores. The
    same command resumes a stopped run from its last checkpoint.
    """
    arguments = dict(locals())
    del arguments["as_json"]
    arguments["config"] = parse_overrides(config or [])
    from fastbert.seq2seq import Seq2SeqOptions
    from fastbert.seq2seq import train as run

    result = run(Seq2SeqOptions(**arguments), console=err)
    if not is_first_process():
        return
    if as_json:
        print_json(result)
    else:
        _print(result)


def _print(result: Seq2SeqResult) -> None:
    table = new_table("held-out pairs")
    for heading in ("source", "output", "expected"):
        table.add_column(heading, overflow="fold")
    for row in result.examples:
        # Rich interprets brackets in a str as markup, but not in a Text.
        table.add_row(*(Text(row[name]) for name in ("source", "output", "target")))
    out.print(table)
    held_out = result.pairs["validation"]
    exact = round(result.figures["exact_match"] * held_out)
    for line in (
        f"exact match {exact / held_out:.2%}: {exact:,} of {held_out:,} held-out sources, after "
        f"{result.steps:,} steps in {result.seconds:.0f} s",
        f"model    {result.model}",
        f"metrics  {result.metrics}",
        f"curves   {result.curves}",
    ):
        out.print(line, highlight=False, markup=False, soft_wrap=True)


@seq2seq.command(epilog='Example: [bold]fastbert seq2seq predict MODEL --text "forty-two"[/]')
def predict(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder of a trained model, such as OUT/model."),
    ],
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="INPUT",
            help="A .txt with one text per line, a .jsonl, a .csv, a .tsv or a .parquet.",
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Argument(metavar="OUT", help="A .jsonl that receives the target of each line."),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Print the target of this text instead of reading a file; may be repeated.",
            callback=_typed_texts,
        ),
    ] = None,
    field: Annotated[
        str, typer.Option(help="Field of the .jsonl, or column of another file, that has the text.")
    ] = "text",
    id_field: Annotated[
        str | None,
        typer.Option(help="Field or column of ids, texts or integers, which OUT then has as id."),
    ] = None,
    num_beams: Annotated[
        int | None, typer.Option(help="Number of beams; by default as the model says.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="reference, triton, cuda or cpu; by default each operation chooses."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the targets or a summary as JSON on stdout.")
    ] = False,
) -> None:
    """Write what a trained model makes of each line of INPUT to OUT, or print that of --text.

    OUT has the field target, and id with --id-field. It appears when it is complete; until then
    OUT.partial keeps the finished lines. After an interruption, the same command continues from
    these lines.
    """
    one_of("--backend", backend, BACKENDS)
    others = {"INPUT": source, "--id-field": id_field}
    if text and any(value is not None for value in others.values()):
        given = next(name for name, value in others.items() if value is not None)
        raise ValueError(f"--text: got a text and {given}, allowed: --text, or INPUT and OUT")
    if not text and (source is None or target is None):
        missing = "INPUT" if source is None else "OUT"
        raise ValueError(f"{missing}: got none, allowed: INPUT and OUT, or --text")
    from fastbert.jobs.texts import Texts, check_output
    from fastbert.seq2seq import Writer
    from fastbert.seq2seq import predict as job

    if text:
        written = Writer(model, num_beams=num_beams, backend=backend)(text)
        _print_targets(text, written, as_json=as_json)
        return
    assert source is not None
    assert target is not None
    check_output(target, source, (".jsonl",))
    reporter = ConsoleReporter()
    texts = Texts(source, (field,), reporter, id_field)
    writer = Writer(model, num_beams=num_beams, backend=backend)
    summary = job(writer, texts, target, reporter=reporter)
    if as_json:
        print_json(summary)
    else:
        out.print(f"{summary['texts']:,} texts → {target}", highlight=False, soft_wrap=True)


def _print_targets(texts: list[str], targets: list[str], *, as_json: bool) -> None:
    if as_json:
        pairs = zip(texts, targets, strict=True)
        print_json([{"source": text, "target": target} for text, target in pairs])
        return
    for target in targets:
        out.print(target, highlight=False, markup=False, soft_wrap=True)
