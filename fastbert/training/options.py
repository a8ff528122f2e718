"""What a pre-training run is told: a frozen dataclass, checked before anything is read."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastbert.config import PRESETS, BertConfig
from fastbert.ops.backend import validate

PRECISIONS = ("fp32", "bf16")
# [CLS] a [SEP] b [SEP]: the shortest pair that still leaves a token to mask on each side.
SHORTEST_PAIR = 8


def _check(option: str, value: Any, allowed: str, ok: bool) -> None:
    if not ok:
        raise ValueError(f"{option}: got {value!r}, allowed: {allowed}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class PretrainOptions:
    """Options of :func:`fastbert.training.pretrain`.

    output: folder that receives ``log.jsonl``, ``curves.png`` and ``model/``.
    corpus: file or folder of .txt, .jsonl or .parquet; None when the documents are handed to
        ``pretrain``.
    preset, config: the model: a preset's name, and ``BertConfig`` fields that override it.
    tokenizer: folder of a trained tokenizer; None trains one of ``vocab_size`` pieces on the
        corpus.
    max_length: tokens per pair, [CLS] and both [SEP] included.
    tokens_per_batch: the budget of one batch on one process.
    steps, epochs: length of the run, at most one of them; one epoch when neither is given. An epoch
        has as many steps as the first.
    learning_rate: the peak; it rises over the first ``warmup`` fraction of the steps, then falls to
        zero, both linearly. clip_norm: bound on the gradient's L2 norm.
    precision: "fp32", or "bf16" for autocast with fp32 weights.
    held_out: fraction of the documents kept for evaluation; 0 keeps none.
    packed: batches without padding; False pads them. whole_word: mask whole words.
    log_every, eval_every, save_every: in steps; the last two None: once, at the end.
    eval_batches: an evaluation reads at most this many batches.
    workers: processes that prepare batches beside the training; 0 prepares them in line.

    Raises ValueError naming the option, the value and what is allowed.
    """

    output: str | os.PathLike[str]
    corpus: str | os.PathLike[str] | None = None
    overwrite: bool = False
    preset: str = "mini"
    config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | os.PathLike[str] | None = None
    vocab_size: int = 8192
    lowercase: bool = True
    max_length: int = 128
    tokens_per_batch: int = 4096
    steps: int | None = None
    epochs: int | None = None
    learning_rate: float = 5e-4
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    precision: str = "fp32"
    seed: int = 0
    held_out: float = 0.05
    whole_word: bool = False
    packed: bool = True
    gradient_checkpointing: bool = False
    backend: str | None = None
    log_every: int = 10
    eval_every: int | None = None
    eval_batches: int = 50
    save_every: int | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_numbers()
        _check("preset", self.preset, ", ".join(PRESETS), self.preset in PRESETS)
        _check("precision", self.precision, ", ".join(PRECISIONS), self.precision in PRECISIONS)
        validate(self.backend)
        both = self.steps is not None and self.epochs is not None
        _check("steps and epochs", (self.steps, self.epochs), "at most one of them", not both)
        known = BertConfig.__dataclass_fields__
        for name in self.config:
            _check("config", name, "fields of BertConfig: " + ", ".join(known), name in known)
        for name in ("vocab_size", "pad_token_id"):
            allowed = f"no {name}: the tokenizer decides it (options vocab_size, tokenizer)"
            _check("config", dict(self.config), allowed, name not in self.config)
        self.model_config(self.vocab_size)

    def _check_counts(self) -> None:
        for name in ("vocab_size", "max_length", "tokens_per_batch", "log_every", "eval_batches"):
            value = getattr(self, name)
            _check(name, value, "an integer >= 1", _is_count(value))
        for name in ("steps", "epochs", "eval_every", "save_every"):
            value = getattr(self, name)
            _check(name, value, "None or an integer >= 1", value is None or _is_count(value))
        allowed = "an integer >= 0"
        _check("workers", self.workers, allowed, self.workers == 0 or _is_count(self.workers))
        allowed = "an integer in [0, 2**63)"
        integer = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        _check("seed", self.seed, allowed, integer and 0 <= self.seed < 2**63)
        allowed = f"an integer >= {SHORTEST_PAIR}: [CLS] a [SEP] b [SEP] and a few tokens"
        _check("max_length", self.max_length, allowed, self.max_length >= SHORTEST_PAIR)
        allowed = f"an integer >= max_length ({self.max_length})"
        _check(
            "tokens_per_batch",
            self.tokens_per_batch,
            allowed,
            self.tokens_per_batch >= self.max_length,
        )

    def _check_numbers(self) -> None:
        for name in ("learning_rate", "clip_norm"):
            value = getattr(self, name)
            _check(name, value, "a finite number > 0", _is_number(value) and value > 0)
        value = self.weight_decay
        _check("weight_decay", value, "a finite number >= 0", _is_number(value) and value >= 0)
        for name in ("warmup", "held_out"):
            value = getattr(self, name)
            _check(name, value, "a number in [0, 1)", _is_number(value) and 0 <= value < 1)

    def model_config(self, vocab_size: int, pad_token_id: int = 0) -> BertConfig:
        """The model's configuration, once the tokenizer's vocabulary and padding id are known."""
        ids = {"vocab_size": vocab_size, "pad_token_id": pad_token_id}
        config = BertConfig.preset(self.preset, **ids, **self.config)
        positions = config.max_position_embeddings
        allowed = f"at most max_position_embeddings ({positions})"
        _check("max_length", self.max_length, allowed, self.max_length <= positions)
        return config

    @property
    def folder(self) -> Path:
        return Path(self.output)
