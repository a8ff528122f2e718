"""``fastbert pretrain``: masked-LM and next-sentence pre-training on the user's own text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastbert.cli.common import err, out, print_json

if TYPE_CHECKING:
    from fastbert.training import TrainResult

MODEL, DATA, RUN = "Model", "Data", "Run"


def _option(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


# The defaults are PretrainOptions' own, repeated because reading them would import torch for
# --help; a test compares the two.
def pretrain(
    corpus: Annotated[
        Path,
        typer.Argument(
            metavar="CORPUS", help="A file or folder: .txt, .jsonl (field text), .parquet."
        ),
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder for model/, log.jsonl and curves.png.")
    ],
    overwrite: Annotated[bool, _option(RUN, "Replace a checkpoint in OUT.", "--overwrite")] = False,
    preset: Annotated[str, _option(MODEL, "tiny, mini, base or large.")] = "mini",
    config: Annotated[
        list[str] | None, _option(MODEL, "KEY=VALUE of BertConfig; may be repeated.")
    ] = None,
    tokenizer: Annotated[
        Path | None, _option(DATA, "Folder of a trained tokenizer; else one is trained.")
    ] = None,
    vocab_size: Annotated[int, _option(DATA, "Pieces of the tokenizer to train.")] = 8192,
    lowercase: Annotated[
        bool, _option(DATA, "Fold case and accents.", "--lowercase/--cased")
    ] = True,
    max_length: Annotated[int, _option(DATA, "Tokens per pair of sentences.")] = 128,
    tokens_per_batch: Annotated[int, _option(DATA, "Token budget of a batch.")] = 4096,
    steps: Annotated[int | None, _option(RUN, "Length in steps ...")] = None,
    epochs: Annotated[int | None, _option(RUN, "... or epochs; one epoch if neither.")] = None,
    learning_rate: Annotated[float, _option(RUN, "Peak of the schedule.")] = 5e-4,
    warmup: Annotated[float, _option(RUN, "Fraction of the steps that warm up.")] = 0.1,
    weight_decay: Annotated[float, _option(RUN, "AdamW's decay of the matrices.")] = 0.01,
    clip_norm: Annotated[float, _option(RUN, "Bound on the gradient's norm.")] = 1.0,
    precision: Annotated[str, _option(RUN, "fp32, or bf16 for autocast.")] = "fp32",
    seed: Annotated[int, _option(RUN, "Seeds everything.")] = 0,
    held_out: Annotated[float, _option(DATA, "Fraction of documents kept to evaluate.")] = 0.05,
    whole_word: Annotated[bool, _option(DATA, "Mask whole words.", "--whole-word")] = False,
    packed: Annotated[
        bool, _option(DATA, "Batches without or with padding.", "--packed/--padded")
    ] = True,
    gradient_checkpointing: Annotated[
        bool, _option(RUN, "Recompute layers to save memory.", "--gradient-checkpointing")
    ] = False,
    backend: Annotated[
        str | None, _option(RUN, "reference, triton, cuda or cpu; chosen if not given.")
    ] = None,
    log_every: Annotated[int, _option(RUN, "Steps between rows of the log.")] = 10,
    eval_every: Annotated[int | None, _option(RUN, "Steps between evaluations; else last.")] = None,
    eval_batches: Annotated[int, _option(RUN, "Batches that an evaluation reads at most.")] = 50,
    save_every: Annotated[int | None, _option(RUN, "Steps between saves; else last.")] = None,
    workers: Annotated[int, _option(DATA, "Processes that prepare batches; 0: in line.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON on stdout.")
    ] = False,
) -> None:
    """Pre-train a BERT from scratch on CORPUS with masked-LM and next-sentence losses."""
    arguments = dict(locals())
    del arguments["as_json"]
    arguments["config"] = parse_overrides(config or [])
    from fastbert.training import PretrainOptions
    from fastbert.training import pretrain as train

    result = train(PretrainOptions(**arguments), console=err)
    if as_json:
        print_json(result)
    else:
        _print(result)


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """``["hidden_size=64"]`` as ``{"hidden_size": 64}``; a value is JSON, or the text itself."""
    overrides: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator:
            raise ValueError(f"--config: got {pair!r}, expected KEY=VALUE, such as hidden_size=256")
        try:
            overrides[key] = json.loads(text)
        except ValueError:
            overrides[key] = text
    return overrides


def _print(result: TrainResult) -> None:
    figures = result.evaluation
    held_out = "nothing held out"
    if figures is not None:
        held_out = (
            f"held-out masked-LM accuracy {figures['mlm_accuracy']:.1%} (most frequent token "
            f"{figures['mlm_baseline_accuracy']:.1%}), next-sentence {figures['nsp_accuracy']:.1%}"
        )
    for line in (
        f"{result.steps:,} steps, {result.tokens:,} tokens in {result.seconds:.0f} s "
        f"({result.tokens_per_second:,.0f} tokens/s); {held_out}",
        f"checkpoint  {result.checkpoint}",
        f"log         {result.log}",
        f"curves      {result.curves}",
    ):
        out.print(line, highlight=False, markup=False, soft_wrap=True)
