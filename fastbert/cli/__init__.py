"""The command line: each command has a file that parses options, calls the library and prints.

No file of this folder imports torch before a command runs, so that ``fastbert --help`` is fast.
"""

from __future__ import annotations

import typer

from fastbert.cli.bench import bench
from fastbert.cli.check import check
from fastbert.cli.classify import classify
from fastbert.cli.common import FriendlyGroup
from fastbert.cli.demo import demo
from fastbert.cli.encode import encode
from fastbert.cli.explain import explain
from fastbert.cli.fill_mask import fill_mask
from fastbert.cli.finetune import finetune
from fastbert.cli.info import info
from fastbert.cli.predict import predict
from fastbert.cli.prepare import prepare
from fastbert.cli.pretrain import pretrain
from fastbert.cli.seq2seq import seq2seq
from fastbert.cli.tune import tune
from fastbert.cli.view import view
from fastbert.cli.word_map import word_map
from fastbert.version import __version__

app = typer.Typer(
    name="fastbert",
    cls=FriendlyGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fastbert {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Fused kernels and modules for BERT-family encoders, checked against a plain reference.

    Start with [bold]fastbert info[/], which shows what this machine can run. Then
    [bold]fastbert check[/] compares every operation with the reference, and
    [bold]fastbert demo[/] pre-trains a small BERT.
    """


for _name, _function, _example in (
    ("info", info, "fastbert info --json | jq .extension"),
    ("check", check, "fastbert check --op layer_norm --backend cpu"),
    ("bench", bench, "fastbert bench --quick --json bench.json --plot bench.png"),
    ("tune", tune, "fastbert tune sentence-transformers/all-MiniLM-L6-v2"),
    ("demo", demo, "fastbert demo --out demo"),
    ("prepare", prepare, "fastbert prepare texts corpus --workers 8"),
    (
        "pretrain",
        pretrain,
        "fastbert pretrain /usr/share/common-licenses out --preset tiny --steps 300",
    ),
    ("predict", predict, "fastbert predict out/reviews/model new.csv labels.jsonl"),
    ("fill-mask", fill_mask, 'fastbert fill-mask demo/model "The dog [MASK] the ball."'),
    ("view", view, 'fastbert view demo/model "The dog [MASK] the ball." -o page.html'),
    ("encode", encode, "fastbert encode demo/model sentences.txt sentences.npy --normalize"),
    ("classify", classify, "fastbert classify model reviews.parquet labels.parquet --field body"),
    ("explain", explain, 'fastbert explain reviews/model "A moving film." -o explanation.html'),
    ("word-map", word_map, "fastbert word-map demo/model texts dog -o dog.html"),
):
    app.command(_name, epilog=f"Example: [bold]{_example.replace('[', chr(92) + '[')}[/]")(
        _function
    )
app.add_typer(finetune, name="finetune")
app.add_typer(seq2seq, name="seq2seq")


def main() -> None:
    """Entry point of the ``fastbert`` script and of ``python -m fastbert``."""
    app()
