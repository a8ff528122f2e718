"""``fastbert finetune``: classification, regression, tags of words and answers to questions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastbert.cli.arguments import option
from fastbert.cli.common import FriendlyGroup, err, is_first_process, new_table, out, print_json

if TYPE_CHECKING:
    from fastbert.finetuning import FinetuneOptions, FinetuneResult

DATA, RUN = "Data", "Run"

finetune = typer.Typer(
    cls=FriendlyGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Fine-tune a pre-trained BERT for a task; each task is a subcommand.",
)


# The options that all tasks share. Their defaults are copies of the defaults of FinetuneOptions,
# because an import of FinetuneOptions would import torch for --help. A test compares the copies.
Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Folder (or hub id) of a pre-trained BERT."),
]
Output = Annotated[
    Path,
    option(RUN, "Folder for model/, metrics.json, pictures, log and checkpoints/.", "-o", "--out"),
]
ClassWeights = Annotated[
    str | None,
    option(
        RUN,
        "Weights of the labels in the loss: balanced makes all labels count equally, and "
        "no=1,yes=4 gives weights by name; by default, all examples count equally.",
        metavar="balanced|NAME=NUMBER,…",
    ),
]
Validation = Annotated[
    Path | None, option(DATA, "The validation part; by default that in DATA, or --held-out.")
]
Test = Annotated[Path | None, option(DATA, "The test part; by default that in DATA.")]
HeldOut = Annotated[float, option(DATA, "Fraction held out without a validation part.")]
Overwrite = Annotated[
    bool, option(RUN, "Start anew and replace an earlier run in OUT.", "--overwrite")
]
Epochs = Annotated[int, option(RUN, "Number of epochs.")]
BatchSize = Annotated[int, option(RUN, "Number of sequences of a batch.")]
LearningRate = Annotated[float, option(RUN, "Peak of the learning rate.")]
Warmup = Annotated[float, option(RUN, "Fraction of the steps in which the rate rises.")]
WeightDecay = Annotated[float, option(RUN, "AdamW's decay of matrices and tables.")]
ClipNorm = Annotated[float, option(RUN, "Largest L2 norm of the gradient.")]
MaxLength = Annotated[
    int | None,
    option(DATA, "Largest number of tokens; by default the limit of the model, or 384 for qa."),
]
Freeze = Annotated[
    bool,
    option(
        RUN,
        "Train only the head (and its pooler); embeddings and layers keep their weights and have "
        "no dropout.",
        "--freeze",
    ),
]
Precision = Annotated[str, option(RUN, "fp32, or bf16 for autocast to bf16.")]
Seed = Annotated[int, option(RUN, "Seed of the data, the head and dropout.")]
Backend = Annotated[
    str | None, option(RUN, "reference, triton, cuda or cpu; by default each operation chooses.")
]
KeepEpoch = Annotated[
    str,
    option(
        RUN,
        "best keeps the model after the best evaluation of the validation part, by accuracy, "
        "Pearson correlation or F1, as the task has it; last keeps the model after the last step.",
    ),
]
Patience = Annotated[
    int | None,
    option(RUN, "Stop after this number of evaluations without a better one; by default never."),
]
EvalEvery = Annotated[
    int | None,
    option(RUN, "Steps between two evaluations; by default one after each epoch."),
]
LogEvery = Annotated[int, option(RUN, "Steps between two rows of the log.")]
SaveEvery = Annotated[
    int | None, option(RUN, "Steps between two checkpoints; by default one after each epoch.")
]
SaveMinutes = Annotated[
    float | None, option(RUN, "Largest number of minutes between two checkpoints.")
]
KeepCheckpoints = Annotated[int, option(RUN, "Checkpoints that stay in OUT/checkpoints.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def _example(text: str) -> str:
    return f"Example: [bold]fastbert finetune {text}[/]"


@finetune.command(epilog=_example("classify out/demo/model reviews.csv -o out/reviews"))
def classify(
    model: Model,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="A .csv, .tsv, .jsonl or .parquet, or a folder with train, validation and test: "
            "such files, or folders with a subfolder of .txt files for each label.",
        ),
    ],
    output: Output,
    text_field: Annotated[str, option(DATA, "Column or field that has the text.")] = "text",
    pair_field: Annotated[
        str | None, option(DATA, "Column or field that has a second text.")
    ] = None,
    label_field: Annotated[str, option(DATA, "Column or field that has the label.")] = "label",
    labels: Annotated[
        str | None,
        option(DATA, "Names of the labels, separated by commas; by default those in DATA."),
    ] = None,
    regression: Annotated[
        bool, option(DATA, "Predict numbers instead of labels.", "--regression")
    ] = False,
    multi_label: Annotated[
        bool,
        option(
            DATA,
            "Predict any number of labels for each text; the data have a list, or a text in which "
            "--label-separator stands between two labels.",
            "--multi-label",
        ),
    ] = False,
    label_separator: Annotated[
        str, option(DATA, "Text between two labels, with --multi-label.")
    ] = ",",
    class_weights: ClassWeights = None,
    validation: Validation = None,
    test: Test = None,
    held_out: HeldOut = 0.1,
    overwrite: Overwrite = False,
    epochs: Epochs = 3,
    batch_size: BatchSize = 16,
    learning_rate: LearningRate = 3e-5,
    warmup: Warmup = 0.1,
    weight_decay: WeightDecay = 0.01,
    clip_norm: ClipNorm = 1.0,
    max_length: MaxLength = None,
    freeze: Freeze = False,
    precision: Precision = "fp32",
    seed: Seed = 0,
    backend: Backend = None,
    keep_epoch: KeepEpoch = "best",
    patience: Patience = None,
    eval_every: EvalEvery = None,
    log_every: LogEvery = 10,
    save_every: SaveEvery = None,
    save_minutes: SaveMinutes = None,
    keep_checkpoints: KeepCheckpoints = 2,
    as_json: AsJson = False,
) -> None:
    """Fine-tune for the classification of texts or pairs of texts, or for regression.

    The same command resumes a stopped run from its last checkpoint.
    """
    given = dict(locals())
    from fastbert.finetuning import ClassifyOptions

    _run(ClassifyOptions, given)


@finetune.command(epilog=_example("tag out/demo/model train.conll -o out/names"))
def tag(
    model: Model,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="A CoNLL file, a .jsonl or a .parquet, or a folder with such files for train, "
            "validation and test.",
        ),
    ],
    output: Output,
    words_field: Annotated[
        str,
        option(DATA, "Field of a .jsonl or .parquet, or number of a column, that has the words."),
    ] = "tokens",
    tags_field: Annotated[
        str,
        option(DATA, "Field of a .jsonl or .parquet, or number of a column, that has the tags."),
    ] = "tags",
    labels: Annotated[
        str | None,
        option(DATA, "Names of the tags, separated by commas; by default those in DATA."),
    ] = None,
    class_weights: ClassWeights = None,
    validation: Validation = None,
    test: Test = None,
    held_out: HeldOut = 0.1,
    overwrite: Overwrite = False,
    epochs: Epochs = 3,
    batch_size: BatchSize = 16,
    learning_rate: LearningRate = 3e-5,
    warmup: Warmup = 0.1,
    weight_decay: WeightDecay = 0.01,
    clip_norm: ClipNorm = 1.0,
    max_length: MaxLength = None,
    freeze: Freeze = False,
    precision: Precision = "fp32",
    seed: Seed = 0,
    backend: Backend = None,
    keep_epoch: KeepEpoch = "best",
    patience: Patience = None,
    eval_every: EvalEvery = None,
    log_every: LogEvery = 10,
    save_every: SaveEvery = None,
    save_minutes: SaveMinutes = None,
    keep_checkpoints: KeepCheckpoints = 2,
    as_json: AsJson = False,
) -> None:
    """Fine-tune for the tags of words, such as names of persons and places.

    The same command resumes a stopped run from its last checkpoint.
    """
    given = dict(locals())
    from fastbert.finetuning import TagOptions

    _run(TagOptions, given)


@finetune.command(epilog=_example("qa out/demo/model train-v1.1.json -o out/answers"))
def qa(
    model: Model,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="A .json of SQuAD 1.1 or 2.0, a .jsonl or a .parquet, or a folder with such files "
            "for train, validation and test.",
        ),
    ],
    output: Output,
    stride: Annotated[
        int,
        option(
            DATA,
            "Tokens that two windows of a long context share; at most a third of --max-length is "
            "used.",
        ),
    ] = 128,
    longest_answer: Annotated[int, option(RUN, "Largest number of tokens of an answer.")] = 30,
    no_answer_threshold: Annotated[
        float,
        option(
            RUN,
            "Give no answer if its score is larger than that of the best answer by more than this; "
            "kept with the model.",
        ),
    ] = 0.0,
    validation: Validation = None,
    test: Test = None,
    held_out: HeldOut = 0.1,
    overwrite: Overwrite = False,
    epochs: Epochs = 3,
    batch_size: BatchSize = 16,
    learning_rate: LearningRate = 3e-5,
    warmup: Warmup = 0.1,
    weight_decay: WeightDecay = 0.01,
    clip_norm: ClipNorm = 1.0,
    max_length: MaxLength = None,
    freeze: Freeze = False,
    precision: Precision = "fp32",
    seed: Seed = 0,
    backend: Backend = None,
    keep_epoch: KeepEpoch = "best",
    patience: Patience = None,
    eval_every: EvalEvery = None,
    log_every: LogEvery = 10,
    save_every: SaveEvery = None,
    save_minutes: SaveMinutes = None,
    keep_checkpoints: KeepCheckpoints = 2,
    as_json: AsJson = False,
) -> None:
    """Fine-tune for the extraction of answers to questions from their contexts.

    The same command resumes a stopped run from its last checkpoint.
    """
    given = dict(locals())
    from fastbert.finetuning import AnswerOptions

    _run(AnswerOptions, given)


def _run(kind: type[FinetuneOptions], given: dict[str, Any]) -> None:
    """Fine-tune with the arguments of a command, and print the result."""
    from fastbert.finetuning import finetune as train
    from fastbert.finetuning.class_weights import parse_class_weights

    as_json = given.pop("as_json")
    if "labels" in given:
        given["labels"] = _names(given["labels"])
    if "class_weights" in given:
        given["class_weights"] = parse_class_weights(given["class_weights"])
    result = train(kind(**given), console=err)
    if not is_first_process():
        return
    if as_json:
        print_json(result)
    else:
        _print(result)


def _names(text: str | None) -> tuple[str, ...]:
    """Return the names in `text`, which are separated by commas, without surrounding blanks."""
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    if not all(names):
        raise ValueError(
            f"labels: got {text!r}, allowed: names separated by commas, none of them empty"
        )
    return names


def _print(result: FinetuneResult) -> None:
    table = new_table()
    table.add_column("part", style="bold")
    table.add_column("examples", justify="right")
    table.add_column("figures")
    for part, figures in result.figures.items():
        table.add_row(part, f"{figures['examples']:,}", result.summary[part])
    out.print(table)
    for name in ("model", "metrics", "curves", "confusion"):
        if (path := getattr(result, name)) is not None:
            out.print(f"{name:<10}  {path}", highlight=False, markup=False, soft_wrap=True)
