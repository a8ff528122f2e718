"""The options of a seq2seq run; they are checked before any file is read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fastbert.config import is_integer
from fastbert.seq2seq.tasks import TASKS
from fastbert.training.options import check, check_common, check_counts, is_number
from fastbert.transformer_config import FIELDS, TransformerConfig

# A run may be resumed with other values of these options, which do not change its results. For the
# options with paths of data, a resumed run compares the content of the data instead.
FREE = (
    "output", "pairs", "corpus", "overwrite", "save_every", "save_minutes", "keep_checkpoints",
)  # fmt: skip
# The task without options, and the defaults of `merges` and `epochs` for pairs of the user.
DEFAULT = "numbers"
MERGES, EPOCHS = 2000, 10
# The configuration of the model, where it differs from the defaults of `TransformerConfig`.
SIZES: dict[str, Any] = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "dropout": 0.0,
    # The scale of embeddings and of Glorot's matrices, d_model ** -0.5. With the 0.02 of BERT, so
    # narrow a model learns several times more slowly.
    "init_std": 0.09,
}
# The data and the tokenizer decide these fields.
DECIDED = (
    "vocab_size", "decoder_vocab_size", "max_position_embeddings", "pad_token_id", "eos_token_id",
    "decoder_start_token_id", "share_encoder_decoder_embeddings", "tie_word_embeddings",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Seq2SeqOptions:
    """The options of the training of an encoder–decoder on pairs of texts.

    Args:
        output: Folder that receives ``model/``, ``metrics.json``, ``log.jsonl``, ``curves.png`` and
            ``checkpoints/``.
        task: A built-in task: ``"hyphens"``, ``"numbers"`` or ``"reverse"``. None takes `pairs`, or
            ``"numbers"`` if `pairs` is None too.
        pairs: File of pairs instead of a built-in task: .csv, .tsv, .jsonl or .parquet.
        source_field: Column or field of the sources in `pairs`.
        target_field: Column or field of the targets in `pairs`.
        corpus: File or folder of text for the tasks ``"hyphens"`` and ``"reverse"``; None takes the
            language reference of Python.
        held_out: Fraction of the data that is held out for the evaluation, in (0, 1).
        merges: Number of merges of neighbouring pieces (byte-pair encoding). With 0, each byte is a
            piece. None takes the default of the task; for `pairs`, 2000.
        max_length: Largest number of pieces of a source and of a target. Longer pairs are left out,
            and the run tells their number.
        config: Fields of `TransformerConfig` that replace the values of the small model.
        overwrite: Whether the run starts from its first step and replaces an earlier run in
            `output`. With False, the earlier run is resumed.
        epochs: Number of epochs. None takes the default of the task; for `pairs`, 10.
        batch_size: Number of pairs of a batch.
        learning_rate: Peak of the learning rate, which rises linearly and then falls linearly to
            zero.
        warmup: Fraction of the steps in which the learning rate rises, in [0, 1).
        weight_decay: Weight decay of matrices and embedding tables.
        clip_norm: Largest L2 norm of the gradient.
        precision: ``"fp32"``, or ``"bf16"`` for autocast with fp32 weights.
        seed: Seed of the pairs, the held-out part, the weights, the batches and dropout.
        backend: The backend that the model asks for: ``"reference"``, ``"triton"``, ``"cuda"`` or
            ``"cpu"``; None lets every operation choose.
        eval_every: Number of steps between two evaluations of the held-out part; None evaluates
            after each epoch.
        log_every: Number of steps between two rows of the log.
        save_every: Number of steps between two checkpoints. A checkpoint is also written after each
            epoch; None writes only these checkpoints.
        save_minutes: Largest number of minutes between two checkpoints; None sets no limit.
        keep_checkpoints: Number of newest checkpoints that stay in the folder ``checkpoints``.

    Raises:
        ValueError: If an option is not allowed. The message names the option, its value and the
            allowed values.
    """

    output: str | os.PathLike[str]
    task: str | None = None
    pairs: str | os.PathLike[str] | None = None
    source_field: str = "source"
    target_field: str = "target"
    corpus: str | os.PathLike[str] | None = None
    held_out: float = 0.02
    merges: int | None = None
    max_length: int = 64
    config: dict[str, Any] = field(default_factory=dict)
    overwrite: bool = False
    epochs: int | None = None
    batch_size: int = 64
    learning_rate: float = 2e-3
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    precision: str = "fp32"
    seed: int = 0
    backend: str | None = None
    eval_every: int | None = None
    log_every: int = 50
    save_every: int | None = None
    save_minutes: float | None = None
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        """Check the options, and replace a None that stands for a default of the task."""
        both = self.task is not None and self.pairs is not None
        check("task and pairs", (self.task, str(self.pairs)), "at most one of them", not both)
        if self.pairs is None and self.task is None:
            object.__setattr__(self, "task", DEFAULT)
        check("task", self.task, ", ".join(TASKS), self.pairs is not None or self.task in TASKS)
        task = None if self.task is None else TASKS[self.task]
        if self.merges is None:
            object.__setattr__(self, "merges", MERGES if task is None else task.merges)
        if self.epochs is None:
            object.__setattr__(self, "epochs", EPOCHS if task is None else task.epochs)
        reads = task is not None and task.needs_text
        allowed = f"None, because {self.task or 'pairs'} needs no text"
        corpus = None if self.corpus is None else os.fspath(self.corpus)
        check("corpus", corpus, allowed, corpus is None or reads)
        check_common(self)
        check_counts(self, "epochs", "batch_size", "max_length")
        most = 1 << 20
        allowed = f"an integer in [0, {most}]"
        check("merges", self.merges, allowed, is_integer(self.merges, 0, most))
        value = self.held_out
        check("held_out", value, "a number in (0, 1)", is_number(value) and 0 < value < 1)
        for name in self.config:
            own = ", ".join(key for key in FIELDS if key not in DECIDED)
            check("config", name, f"fields of TransformerConfig: {own}", name in own.split(", "))
        self.model_config(2)

    @property
    def folder(self) -> Path:
        """Path of the folder `output`."""
        return Path(self.output)

    @property
    def data_name(self) -> str:
        """Name of the data: that of the task, or ``"pairs"``."""
        return self.task or "pairs"

    def model_config(self, vocab_size: int, *, padding: int = 0, end: int = 1) -> TransformerConfig:
        """Return the configuration of the model.

        Args:
            vocab_size: Number of ids of the tokenizer.
            padding: Id of the padding, which is also the first input of the decoder.
            end: Id of the token that ends a text.

        Raises:
            ValueError: If a value of `config` is not allowed.
        """
        return TransformerConfig(
            vocab_size=vocab_size,
            # A source ends with one more token.
            max_position_embeddings=self.max_length + 1,
            pad_token_id=padding,
            decoder_start_token_id=padding,
            eos_token_id=end,
            **{**SIZES, **self.config},
        )

    def decisive(self) -> dict[str, Any]:
        """Return the options that change the results of a run, as data for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in FREE}
