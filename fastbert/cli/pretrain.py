"""``fastbert pretrain``: masked-LM and next-sentence pre-training on a corpus of the user."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastbert import json_file
from fastbert.cli.arguments import option
from fastbert.cli.common import err, is_first_process, out, print_json

if TYPE_CHECKING:
    from fastbert.training import TrainResult

MODEL, DATA, RUN = "Model", "Data", "Run"


# The defaults are copies of the defaults of PretrainOptions, because an import of PretrainOptions
# would import torch for --help. A test compares the copies.
def pretrain(
    corpus: Annotated[
        Path,
        typer.Argument(
            metavar="CORPUS",
            help="A folder of `fastbert prepare`; or a .txt, a .jsonl or .parquet with the field "
            "text, or a folder of such files.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="Folder for model/, checkpoints/, log.jsonl and curves.png."
        ),
    ],
    overwrite: Annotated[
        bool, option(RUN, "Start anew and replace an earlier run in OUT.", "--overwrite")
    ] = False,
    preset: Annotated[str, option(MODEL, "Size of the model: tiny, mini, base or large.")] = "mini",
    config: Annotated[
        list[str] | None, option(MODEL, "A field of BertConfig as KEY=VALUE; may be repeated.")
    ] = None,
    tokenizer: Annotated[
        Path | None, option(DATA, "Folder of a tokenizer; by default, a tokenizer is trained.")
    ] = None,
    vocab_size: Annotated[int, option(DATA, "Largest vocabulary of a trained tokenizer.")] = 8192,
    lowercase: Annotated[
        bool, option(DATA, "Remove case and accents, or keep them.", "--lowercase/--cased")
    ] = True,
    objective: Annotated[
        str,
        option(DATA, "nsp, sop or none: next sentence, sentence order, or masked-LM alone."),
    ] = "nsp",
    max_length: Annotated[int, option(DATA, "Largest number of tokens of an example.")] = 128,
    short_steps: Annotated[
        float, option(DATA, "Fraction of the steps, at the start, with shorter examples.")
    ] = 0.0,
    short_length: Annotated[
        int, option(DATA, "Largest number of tokens of an example in these steps.")
    ] = 128,
    tokens_per_batch: Annotated[int, option(DATA, "Largest number of tokens of a batch.")] = 4096,
    steps: Annotated[
        int | None, option(RUN, "Number of training steps, instead of --epochs.")
    ] = None,
    epochs: Annotated[int | None, option(RUN, "Number of epochs; 1 without --steps.")] = None,
    accumulate: Annotated[int, option(RUN, "Number of batches of a step on each process.")] = 1,
    optimizer: Annotated[str, option(RUN, "adamw, or lamb for very large batches.")] = "adamw",
    learning_rate: Annotated[float, option(RUN, "Peak of the learning rate.")] = 5e-4,
    schedule: Annotated[
        str, option(RUN, "Shape of the rate after the warm-up: linear, cosine or constant.")
    ] = "linear",
    warmup: Annotated[float, option(RUN, "Fraction of the steps in which the rate rises.")] = 0.1,
    weight_decay: Annotated[float, option(RUN, "Decay of matrices and tables.")] = 0.01,
    ema: Annotated[
        float | None, option(RUN, "Decay of an average of the weights, which model/ then has.")
    ] = None,
    clip_norm: Annotated[float, option(RUN, "Largest L2 norm of the gradient.")] = 1.0,
    precision: Annotated[str, option(RUN, "fp32, or bf16 for autocast to bf16.")] = "fp32",
    seed: Annotated[int, option(RUN, "Seed of the data, the weights and dropout.")] = 0,
    held_out: Annotated[float, option(DATA, "Fraction of the documents for evaluation.")] = 0.05,
    whole_word: Annotated[
        bool, option(DATA, "Mask all pieces of a word together.", "--whole-word")
    ] = False,
    packed: Annotated[
        bool, option(DATA, "Use batches without or with padding.", "--packed/--padded")
    ] = True,
    gradient_checkpointing: Annotated[
        bool, option(RUN, "Recompute activations to save memory.", "--gradient-checkpointing")
    ] = False,
    cuda_graphs: Annotated[
        bool, option(RUN, "Launch whole steps as CUDA graphs, on one GPU.", "--cuda-graphs")
    ] = False,
    shard: Annotated[
        bool, option(RUN, "Share weights and optimizer among the processes (FSDP2).", "--shard")
    ] = False,
    backend: Annotated[
        str | None,
        option(RUN, "reference, triton, cuda or cpu; by default each operation chooses."),
    ] = None,
    log_every: Annotated[int, option(RUN, "Steps between two rows of the log.")] = 10,
    eval_every: Annotated[
        int | None, option(RUN, "Steps between two evaluations; by default only at the end.")
    ] = None,
    eval_batches: Annotated[int, option(RUN, "Largest number of batches of an evaluation.")] = 50,
    save_every: Annotated[
        int | None, option(RUN, "Steps between two checkpoints; by default only at the end.")
    ] = None,
    save_minutes: Annotated[
        float | None, option(RUN, "Largest number of minutes between two checkpoints.")
    ] = None,
    keep_checkpoints: Annotated[
        int, option(RUN, "Number of checkpoints that stay in OUT/checkpoints.")
    ] = 2,
    tracker: Annotated[
        str | None, option(RUN, "tensorboard or wandb, which receives the rows of the log too.")
    ] = None,
    workers: Annotated[
        int, option(DATA, "Processes that prepare batches; 0 uses the training process.")
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON on stdout.")
    ] = False,
) -> None:
    """Pre-train a BERT from scratch on CORPUS with masked-LM and next-sentence losses.

    After Ctrl-C, the run finishes its step and writes a checkpoint. The same command resumes a
    stopped run from its last checkpoint.
    """
    arguments = dict(locals())
    del arguments["as_json"]
    arguments["config"] = parse_overrides(config or [])
    from fastbert.training import PretrainOptions
    from fastbert.training import pretrain as train

    result = train(PretrainOptions(**arguments), console=err)
    if not is_first_process():
        return
    if as_json:
        print_json(result)
    else:
        _print(result, objective)


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """Parse the values of ``--config``: ``["hidden_size=64"]`` becomes ``{"hidden_size": 64}``.

    The text after the first ``=`` is parsed as JSON. Text that is not valid JSON stays a str.
    """
    overrides: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator:
            raise ValueError(f"--config: got {pair!r}, allowed: KEY=VALUE, such as hidden_size=256")
        try:
            overrides[key] = json_file.parse(text)
        except ValueError:
            overrides[key] = text
    return overrides


def _print(result: TrainResult, objective: str) -> None:
    from fastbert.training.log import PAIR_TASKS

    figures = result.evaluation
    held_out = "no documents were held out for evaluation"
    if figures is not None:
        held_out = (
            f"held-out masked-LM accuracy {figures['mlm_accuracy']:.1%} (most frequent token "
            f"{figures['mlm_baseline_accuracy']:.1%})"
        )
        if objective in PAIR_TASKS:
            held_out += f", {PAIR_TASKS[objective]} {figures['nsp_accuracy']:.1%}"
    for line in (
        f"{result.steps:,} steps, {result.tokens:,} tokens in {result.seconds:.0f} s "
        f"({result.tokens_per_second:,.0f} tokens/s); {held_out}",
        f"checkpoint  {result.checkpoint}",
        f"log         {result.log}",
        f"curves      {result.curves}",
    ):
        out.print(line, highlight=False, markup=False, soft_wrap=True)
