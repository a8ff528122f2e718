"""The configuration of a BERT encoder: a frozen dataclass, its presets and its JSON form.

Field names and defaults are those of ``config.json`` of a ``model_type: bert`` checkpoint, so a
file written here opens in transformers and the other way round.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fastbert import activations, json_file

PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
# No product of two sizes overflows an address. No published encoder has a tenth of so many layers.
MAX_SIZE = 2**28
MAX_LAYERS = 1000


def check(name: str, value: Any, allowed: str, ok: bool) -> None:
    """Raises ValueError naming the setting, its value and what is allowed, unless ``ok``."""
    if not ok:
        raise ValueError(f"{name}: got {value!r:.500}, allowed: {allowed}")


def is_integer(value: Any, least: int, most: int = MAX_SIZE) -> bool:
    """Whether ``value`` is an integer, no bool, from ``least`` to ``most``."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def integer_from(least: int, most: int = MAX_SIZE) -> str:
    """What ``is_integer`` allows, in words."""
    return f"an integer >= {least} and <= {most}"


def is_number(value: Any, least: float, most: float = sys.float_info.max) -> bool:
    """Whether ``value`` is a number, no bool and no NaN, from ``least`` to ``most``."""
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
    )


@dataclass(frozen=True)
class Architecture:
    """Where an encoder of BERT's family departs from BERT; the defaults are BERT itself.

    ``fastbert.io.families`` says which departures a ``model_type`` has.
    """

    # The width of the tables, projected to hidden_size; None: hidden_size, without a projection.
    embedding_size: int | None = None
    # Whether positions and token types have tables.
    position_table: bool = True
    type_table: bool = True
    # The first token's position where padding does not count (RoBERTa); None: places in the row.
    first_position: int | None = None
    # Buckets of a learned bias by distance, shared by the layers (MPNet); 0: none.
    distance_buckets: int = 0
    # Of each layer: the base of its rotary positions; how far keys may be on either side, -1 for
    # any distance. Empty: none has one.
    rotary_bases: tuple[float, ...] = ()
    windows: tuple[int, ...] = ()
    # Layer norms before attention and feed-forward, and one behind the last layer (ModernBERT).
    pre_norm: bool = False
    # act(first half) * second half, of a first projection twice as wide.
    gated: bool = False
    attention_bias: bool = True
    feed_forward_bias: bool = True
    norm_bias: bool = True
    pooler: bool = True
    # Layers that run again and again (ALBERT): ``groups`` of ``group_size``; None: each runs once.
    groups: int | None = None
    group_size: int = 1
    # Dropouts that are not hidden_dropout_prob: behind the embeddings, behind attention's
    # projection, inside the feed-forward and behind it.
    embedding_dropout: float | None = None
    attention_output_dropout: float | None = None
    inner_dropout: float = 0.0
    output_dropout: float | None = None

    def __post_init__(self) -> None:
        for name in ("embedding_size", "groups"):
            value = getattr(self, name)
            check(name, value, f"None or {integer_from(1)}", value is None or is_integer(value, 1))
        start, buckets = self.first_position, self.distance_buckets
        allowed = f"None or {integer_from(0)}"
        check("first_position", start, allowed, start is None or is_integer(start, 0))
        check("distance_buckets", buckets, integer_from(0), is_integer(buckets, 0))
        check("group_size", self.group_size, integer_from(1), is_integer(self.group_size, 1))
        stored = (self.groups or 1) * self.group_size
        check("groups * group_size", stored, integer_from(1, MAX_LAYERS), stored <= MAX_LAYERS)
        for base in self.rotary_bases:
            check("rotary_bases", base, "a number >= 1", is_number(base, 1.0))
        for window in self.windows:
            check("windows", window, integer_from(-1), is_integer(window, -1))
        for name in (
            "position_table",
            "type_table",
            "pre_norm",
            "gated",
            "attention_bias",
            "feed_forward_bias",
            "norm_bias",
            "pooler",
        ):
            value = getattr(self, name)
            check(name, value, "True or False", isinstance(value, bool))
        for name in ("embedding_dropout", "attention_output_dropout", "output_dropout"):
            value = getattr(self, name)
            allowed = "None or a number in [0, 1]"
            check(name, value, allowed, value is None or is_number(value, 0.0, 1.0))
        value = self.inner_dropout
        check("inner_dropout", value, "a number in [0, 1]", is_number(value, 0.0, 1.0))

    def order(self, layers: int) -> tuple[int, ...]:
        """Which stored layer runs at each step of an encoder of ``layers`` layers."""
        if self.groups is None:
            return tuple(range(layers))
        first = (int(i / (layers / self.groups)) * self.group_size for i in range(layers))
        return tuple(start + inner for start in first for inner in range(self.group_size))


@dataclass(frozen=True)
class BertConfig:
    """Sizes and switches of a BERT encoder (Devlin et al. 2019, section 3).

    Probabilities are fractions in [0, 1]. ``extra`` keeps the keys of a ``config.json`` that
    fastbert does not read, so that loading and saving a checkpoint loses nothing. Raises ValueError
    on values outside the allowed range, naming the field.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    classifier_dropout: float | None = None
    tie_word_embeddings: bool = True
    num_labels: int = 2
    problem_type: str | None = None
    model_type: str = "bert"
    architecture: Architecture = field(default_factory=Architecture)
    extra: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
            "type_vocab_size",
            "num_labels",
        ):
            value = getattr(self, name)
            check(name, value, integer_from(1), is_integer(value, 1))
        layers = self.num_hidden_layers
        check("num_hidden_layers", layers, integer_from(1, MAX_LAYERS), layers <= MAX_LAYERS)
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            value = getattr(self, name)
            check(name, value, "a number in [0, 1]", is_number(value, 0.0, 1.0))
        value = self.classifier_dropout
        allowed = "None or a number in [0, 1]"
        check("classifier_dropout", value, allowed, value is None or is_number(value, 0.0, 1.0))
        for name in ("initializer_range", "layer_norm_eps"):
            value = getattr(self, name)
            check(name, value, "a finite number >= 0", is_number(value, 0.0))
        value = self.tie_word_embeddings
        check("tie_word_embeddings", value, "True or False", isinstance(value, bool))
        value = self.problem_type
        check("problem_type", value, "None, " + ", ".join(PROBLEMS), value in (None, *PROBLEMS))
        names = activations.of_config(self.architecture.gated)
        check("hidden_act", self.hidden_act, ", ".join(names), self.hidden_act in names)
        check(
            "hidden_size",
            self.hidden_size,
            f"a multiple of num_attention_heads ({self.num_attention_heads})",
            self.hidden_size % self.num_attention_heads == 0,
        )
        if self.pad_token_id is not None:
            value = self.pad_token_id
            allowed = f"None or 0 <= id < vocab_size ({self.vocab_size})"
            check("pad_token_id", value, allowed, is_integer(value, 0, self.vocab_size - 1))
        start = self.architecture.first_position or 0
        value = self.max_position_embeddings
        check("max_position_embeddings", value, f"more than {start}", value > start)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def max_length(self) -> int:
        """The longest sequence, in tokens."""
        return self.max_position_embeddings - (self.architecture.first_position or 0)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> BertConfig:
        """The preset ``name`` (tiny, mini, base, large; Turc et al. 2019) with ``overrides``
        applied.
        """
        check("preset", name, ", ".join(PRESETS), name in PRESETS)
        return cls(**{**PRESETS[name], **overrides})

    def replace(self, **changes: Any) -> BertConfig:
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The content of ``config.json``: unknown keys kept, ``model_type`` and labels
        filled in.
        """
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in OURS}
        num_labels = own.pop("num_labels")
        out = {**self.extra, **own}
        if len(out.get("id2label") or ()) != num_labels:
            labels = {i: f"LABEL_{i}" for i in range(num_labels)}
            out["id2label"] = {str(i): label for i, label in labels.items()}
            out["label2id"] = {label: i for i, label in labels.items()}
        return out

    @classmethod
    def from_dict(
        cls, content: dict[str, Any], architecture: Architecture | None = None
    ) -> BertConfig:
        """Builds a configuration from the content of a ``config.json``; keys it does not know are
        kept.

        Without an ``architecture`` that of BERT; other families are read by
        ``fastbert.io.families``.
        """
        model_type = content.get("model_type", "bert")
        allowed = "bert; of another family fastbert.io.families.read_config reads it"
        check("model_type", model_type, allowed, model_type == "bert" or architecture is not None)
        position = content.get("position_embedding_type", "absolute")
        counted = architecture is None or architecture.position_table
        fits = position == "absolute" or not counted
        check("position_embedding_type", position, "absolute", fits)
        for name in ("is_decoder", "add_cross_attention"):
            check(name, content.get(name, False), "false: an encoder", not content.get(name))
        known = {f.name for f in fields(cls)} - OURS
        values = {key: value for key, value in content.items() if key in known}
        labels = content.get("id2label")
        check("id2label", labels, "an object", labels is None or isinstance(labels, (dict, list)))
        if "num_labels" not in values and labels:
            values["num_labels"] = len(labels)
        extra = {k: v for k, v in content.items() if k not in known}
        return cls(**values, architecture=architecture or Architecture(), extra=extra)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> BertConfig:
        """Reads a ``config.json``. Raises ValueError naming the file when it is no JSON object."""
        return cls.from_dict(json_file.read(Path(path)))


# Fields that are no keys of a config.json.
OURS = {"architecture", "extra"}
PRESETS: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 512,
    },
    "mini": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
    "base": {},
    "large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}
