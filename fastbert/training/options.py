"""The options of a pre-training run; they are checked before any file is read."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fastbert.config import PRESETS, BertConfig, is_integer
from fastbert.data.prepared.examples import OBJECTIVES
from fastbert.ops.backend import validate
from fastbert.training.optimizer import OPTIMIZERS
from fastbert.training.schedules import SCHEDULES
from fastbert.training.trackers import TRACKERS

PRECISIONS = ("fp32", "bf16")
# A pair needs [CLS], two [SEP] and a few tokens on each side, so that there are tokens to mask.
SHORTEST_PAIR = 8
# A run may be resumed with other values of these options, which do not change its results. The text
# of the corpus is compared instead of its path.
FREE = (
    "output", "corpus", "overwrite", "save_every", "save_minutes", "keep_checkpoints", "workers",
    "tracker",
    # `accumulate` may change together with the number of processes, because only the number of
    # batches that all processes take in one step is compared. `shard` decides where weights are.
    "accumulate", "shard",
)  # fmt: skip


def check(option: str, value: Any, allowed: str, ok: bool) -> None:
    """Raise ValueError with the option, its value and the allowed values, unless `ok` is True."""
    if not ok:
        raise ValueError(f"{option}: got {value!r}, allowed: {allowed}")


def is_count(value: Any) -> bool:
    """Return whether `value` is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_counts(options: Any, *names: str, optional: bool = False) -> None:
    """Raise ValueError unless each named option is an integer >= 1, or None if `optional`."""
    allowed = f"{'None or ' * optional}an integer >= 1"
    for name in names:
        value = getattr(options, name)
        check(name, value, allowed, (optional and value is None) or is_count(value))


def check_common(options: Any) -> None:
    """Raise ValueError if an option that every kind of run has is not allowed.

    Args:
        options: The options of a run.
    """
    check_counts(options, "log_every", "keep_checkpoints")
    check_counts(options, "eval_every", "save_every", optional=True)
    check("seed", options.seed, "an integer in [0, 2**63)", is_integer(options.seed, 0, 2**63 - 1))
    for name in ("learning_rate", "clip_norm"):
        value = getattr(options, name)
        check(name, value, "a finite number > 0", is_number(value) and value > 0)
    value = options.save_minutes
    allowed = "None or a finite number > 0"
    check("save_minutes", value, allowed, value is None or (is_number(value) and value > 0))
    value = options.weight_decay
    check("weight_decay", value, "a finite number >= 0", is_number(value) and value >= 0)
    value = options.warmup
    check("warmup", value, "a number in [0, 1)", is_number(value) and 0 <= value < 1)
    value = options.precision
    check("precision", value, ", ".join(PRECISIONS), value in PRECISIONS)
    validate(options.backend)


@dataclass(frozen=True)
class PretrainOptions:
    """Options of `fastbert.training.pretrain`.

    Args:
        output: Folder that receives ``log.jsonl``, ``curves.png``, ``model/`` and ``checkpoints/``.
        corpus: A folder that ``fastbert prepare`` wrote, or a file or folder for
            `fastbert.data.read_documents`; None if the documents are passed to `pretrain`.
        overwrite: Whether the run starts from the first step and replaces an earlier run in
            `output`. With False, `pretrain` resumes the earlier run.
        preset: Preset of the model: ``"tiny"``, ``"mini"``, ``"base"`` or ``"large"``.
        config: Fields of `fastbert.BertConfig` that override the preset.
        tokenizer: Folder of a trained tokenizer; None trains a tokenizer on the corpus.
        vocab_size: Largest vocabulary of a tokenizer that is trained.
        lowercase: Whether a tokenizer that is trained converts texts to lower case.
        objective: The task in addition to masked language modelling: ``"nsp"`` (next sentence, as
            in BERT), ``"sop"`` (order of two segments, as in ALBERT), or ``"none"`` (as in
            RoBERTa). ``"sop"`` and ``"none"`` need a prepared corpus.
        max_length: Largest number of tokens of an example, special tokens included.
        short_steps: Fraction of the steps, at the start, whose examples have at most `short_length`
            tokens; in [0, 1).
        short_length: Largest number of tokens of an example in the first `short_steps` of the run.
        tokens_per_batch: Largest number of tokens of a batch on one process.
        steps: Number of steps; None derives it from `epochs`.
        epochs: Number of epochs, if `steps` is None; None means one epoch. The number of steps is
            `epochs` times the number of steps of the first epoch.
        accumulate: Number of batches of a step on one process. The gradients of these batches are
            averaged, like the gradients of several processes.
        optimizer: ``"adamw"``, or ``"lamb"`` for very large batches.
        learning_rate: Peak of the learning rate, to which the rate rises linearly.
        schedule: Shape of the learning rate after the warm-up: ``"linear"`` and ``"cosine"`` fall
            to zero, and ``"constant"`` stays at the peak.
        warmup: Fraction of the steps in which the learning rate rises, in [0, 1).
        weight_decay: Weight decay of matrices and embedding tables.
        ema: Decay of an exponential moving average of the weights, in (0, 1). ``model/`` and the
            evaluations then use the average. None computes no average.
        clip_norm: Largest L2 norm of the gradient.
        precision: ``"fp32"``, or ``"bf16"`` for autocast with fp32 weights.
        seed: Seed of the split, the weights, the pairs, the masks and dropout.
        held_out: Fraction of the documents that is held out for evaluation, in [0, 1).
        whole_word: Whether all pieces of a word are predicted together.
        packed: Whether batches are packed; if not, they are padded.
        gradient_checkpointing: Whether activations are recomputed in the backward pass, which
            saves memory.
        cuda_graphs: Whether CUDA graphs launch whole steps, which makes steps of a small model
            faster; see `graphed_step`. The run must then have one process on a CUDA device,
            ``optimizer="adamw"``, ``accumulate=1``, and neither `gradient_checkpointing` nor
            `shard`. Steps that are logged run without a graph.
        shard: Whether the processes share the weights and the optimizer's state (FSDP2) instead of
            having copies of them (DDP).
        backend: The backend that the model asks for: ``"reference"``, ``"triton"``, ``"cuda"`` or
            ``"cpu"``. An operation that this backend does not fully serve chooses its backend
            itself, as do all operations with None.
        log_every: Number of steps between two rows of the log.
        eval_every: Number of steps between two evaluations; None evaluates only at the end.
        eval_batches: Largest number of batches of an evaluation.
        save_every: Number of steps between two checkpoints; None writes a checkpoint only at the
            end.
        save_minutes: Largest number of minutes between two checkpoints; None sets no limit.
        keep_checkpoints: Number of newest checkpoints that stay in the folder ``checkpoints``. If
            the last checkpoint is damaged, the run resumes from an earlier checkpoint.
        tracker: ``"tensorboard"`` or ``"wandb"``, which then receives the rows of the log too; None
            uses no tracker.
        workers: Number of processes that prepare batches during the training; 0 prepares batches
            in the training process.

    Raises:
        ValueError: If an option is not allowed. The message names the option, its value and the
            allowed values.

    Examples:
        >>> from fastbert.training import PretrainOptions
        >>> options = PretrainOptions("out", corpus="corpus.txt", preset="tiny", steps=100)
        >>> options.model_config(vocab_size=8192).hidden_size
        128
    """

    output: str | os.PathLike[str]
    corpus: str | os.PathLike[str] | None = None
    overwrite: bool = False
    preset: str = "mini"
    config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | os.PathLike[str] | None = None
    vocab_size: int = 8192
    lowercase: bool = True
    objective: str = "nsp"
    max_length: int = 128
    short_steps: float = 0.0
    short_length: int = 128
    tokens_per_batch: int = 4096
    steps: int | None = None
    epochs: int | None = None
    accumulate: int = 1
    optimizer: str = "adamw"
    learning_rate: float = 5e-4
    schedule: str = "linear"
    warmup: float = 0.1
    weight_decay: float = 0.01
    ema: float | None = None
    clip_norm: float = 1.0
    precision: str = "fp32"
    seed: int = 0
    held_out: float = 0.05
    whole_word: bool = False
    packed: bool = True
    gradient_checkpointing: bool = False
    cuda_graphs: bool = False
    shard: bool = False
    backend: str | None = None
    log_every: int = 10
    eval_every: int | None = None
    eval_batches: int = 50
    save_every: int | None = None
    save_minutes: float | None = None
    keep_checkpoints: int = 2
    tracker: str | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        check_common(self)
        self._check_counts()
        self._check_numbers()
        check("preset", self.preset, ", ".join(PRESETS), self.preset in PRESETS)
        check("objective", self.objective, ", ".join(OBJECTIVES), self.objective in OBJECTIVES)
        optimizers, schedules = ", ".join(OPTIMIZERS), ", ".join(SCHEDULES)
        check("optimizer", self.optimizer, optimizers, self.optimizer in OPTIMIZERS)
        check("schedule", self.schedule, schedules, self.schedule in SCHEDULES)
        trackers = ", ".join(("None", *TRACKERS))
        check("tracker", self.tracker, trackers, self.tracker in (None, *TRACKERS))
        both = self.steps is not None and self.epochs is not None
        check("steps and epochs", (self.steps, self.epochs), "at most one of them", not both)
        self._check_graphs()
        known = BertConfig.__dataclass_fields__
        for name in self.config:
            check("config", name, "fields of BertConfig: " + ", ".join(known), name in known)
        for name in ("vocab_size", "pad_token_id"):
            allowed = f"no {name}: the tokenizer decides it (options vocab_size, tokenizer)"
            check("config", dict(self.config), allowed, name not in self.config)
        self.model_config(self.vocab_size)

    def _check_graphs(self) -> None:
        allowed = "at most one of them"
        for name, value, used in (
            ("gradient_checkpointing", True, self.gradient_checkpointing),
            ("shard", True, self.shard),
            ("accumulate", self.accumulate, self.accumulate > 1),
            ("optimizer", self.optimizer, self.optimizer != "adamw"),
        ):
            both = self.cuda_graphs and used
            check(f"cuda_graphs and {name}", value, allowed, not both)

    def _check_counts(self) -> None:
        check_counts(
            self, "vocab_size", "max_length", "short_length", "tokens_per_batch", "eval_batches",
            "accumulate",
        )  # fmt: skip
        check_counts(self, "steps", "epochs", optional=True)
        allowed = "an integer >= 0"
        check("workers", self.workers, allowed, self.workers == 0 or is_count(self.workers))
        allowed = f"an integer >= {SHORTEST_PAIR}: [CLS] a [SEP] b [SEP] and a few tokens"
        check("max_length", self.max_length, allowed, self.max_length >= SHORTEST_PAIR)
        allowed = f"an integer >= max_length ({self.max_length})"
        check(
            "tokens_per_batch",
            self.tokens_per_batch,
            allowed,
            self.tokens_per_batch >= self.max_length,
        )

    def _check_numbers(self) -> None:
        value = self.ema
        allowed = "None or a number in (0, 1)"
        check("ema", value, allowed, value is None or (is_number(value) and 0 < value < 1))
        for name in ("held_out", "short_steps"):
            value = getattr(self, name)
            check(name, value, "a number in [0, 1)", is_number(value) and 0 <= value < 1)
        shorter = not self.short_steps or SHORTEST_PAIR <= self.short_length < self.max_length
        allowed = f"an integer from {SHORTEST_PAIR} to max_length - 1 ({self.max_length - 1})"
        check("short_length", self.short_length, allowed, shorter)

    def model_config(self, vocab_size: int, pad_token_id: int = 0) -> BertConfig:
        """Return the configuration of the model for a tokenizer.

        Args:
            vocab_size: Size of the tokenizer's vocabulary.
            pad_token_id: Id of the tokenizer's padding token.

        Returns:
            The configuration.

        Raises:
            ValueError: If `config` has a value that is not allowed, or if `max_length` exceeds
                ``max_position_embeddings``.
        """
        ids = {"vocab_size": vocab_size, "pad_token_id": pad_token_id}
        config = BertConfig.preset(self.preset, **ids, **self.config)
        positions = config.max_position_embeddings
        allowed = f"at most max_position_embeddings ({positions})"
        check("max_length", self.max_length, allowed, self.max_length <= positions)
        return config

    def decisive(self) -> dict[str, Any]:
        """Return the options that determine the results of a run, as values of JSON."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in FREE}
        chosen["config"] = dict(self.config)
        if self.tokenizer is not None:
            chosen["tokenizer"] = os.fspath(self.tokenizer)
        return chosen

    @property
    def folder(self) -> Path:
        """Path of the folder `output`."""
        return Path(self.output)
