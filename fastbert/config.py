"""The configuration of a BERT encoder: a frozen dataclass, its presets and its JSON form.

Field names and defaults are those of ``config.json`` of a ``model_type: bert`` checkpoint, so a
file written here opens in transformers and the other way round.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


def _check(name: str, value: Any, allowed: str, ok: bool) -> None:
    if not ok:
        raise ValueError(f"{name}: got {value!r}, allowed: {allowed}")


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
            _check(name, value, "an integer >= 1", isinstance(value, int) and value >= 1)
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            value = getattr(self, name)
            _check(name, value, "a number in [0, 1]", 0.0 <= value <= 1.0)
        if self.classifier_dropout is not None:
            value = self.classifier_dropout
            _check("classifier_dropout", value, "None or a number in [0, 1]", 0.0 <= value <= 1.0)
        _check(
            "hidden_act", self.hidden_act, ", ".join(ACTIVATIONS), self.hidden_act in ACTIVATIONS
        )
        _check(
            "hidden_size",
            self.hidden_size,
            f"a multiple of num_attention_heads ({self.num_attention_heads})",
            self.hidden_size % self.num_attention_heads == 0,
        )
        if self.pad_token_id is not None:
            value = self.pad_token_id
            allowed = f"None or 0 <= id < vocab_size ({self.vocab_size})"
            _check("pad_token_id", value, allowed, 0 <= value < self.vocab_size)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> BertConfig:
        """The preset ``name`` (tiny, mini, base, large; Turc et al. 2019) with ``overrides``
        applied.
        """
        _check("preset", name, ", ".join(PRESETS), name in PRESETS)
        return cls(**{**PRESETS[name], **overrides})

    def replace(self, **changes: Any) -> BertConfig:
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The content of ``config.json``: unknown keys kept, ``model_type`` and labels
        filled in.
        """
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"}
        num_labels = own.pop("num_labels")
        out = {**self.extra, **own, "model_type": "bert"}
        if len(out.get("id2label") or ()) != num_labels:
            labels = {i: f"LABEL_{i}" for i in range(num_labels)}
            out["id2label"] = {str(i): label for i, label in labels.items()}
            out["label2id"] = {label: i for i, label in labels.items()}
        return out

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> BertConfig:
        """Builds a configuration from the content of a ``config.json``; keys it does not know are
        kept.
        """
        model_type = content.get("model_type", "bert")
        _check("model_type", model_type, "bert", model_type == "bert")
        position = content.get("position_embedding_type", "absolute")
        _check("position_embedding_type", position, "absolute", position == "absolute")
        for name in ("is_decoder", "add_cross_attention"):
            _check(name, content.get(name, False), "false: an encoder", not content.get(name))
        known = {f.name for f in fields(cls)} - {"extra"}
        values = {key: value for key, value in content.items() if key in known}
        if "num_labels" not in values and content.get("id2label"):
            values["num_labels"] = len(content["id2label"])
        extra = {k: v for k, v in content.items() if k not in known and k != "model_type"}
        return cls(**values, extra=extra)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> BertConfig:
        """Reads a ``config.json``. Raises ValueError naming the file when it is no JSON object."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"config: {path} is not valid JSON: {error}") from error
        _check("config", type(content).__name__, "a JSON object", isinstance(content, dict))
        return cls.from_dict(content)


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
