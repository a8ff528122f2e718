"""The configuration of a BERT encoder: a frozen dataclass, its presets and its JSON form.

The fields have the names and defaults of ``config.json`` in a checkpoint of ``model_type: bert``.
fastbert and transformers therefore read each other's files.
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
# The largest allowed value of a size, such as `hidden_size`. The product of two sizes is then at
# most 2**56, so that the address of an element of a matrix does not overflow.
MAX_SIZE = 2**28
# BERT with ALiBi, a model type of fastbert's own.
ALIBI = "bert-alibi"
# The model types for which fastbert has heads. Their weights have the names of BERT's.
OWN_TYPES = ("bert", ALIBI)
# The largest allowed number of layers. Published encoders have fewer than 100 layers.
MAX_LAYERS = 1000


def check(name: str, value: Any, allowed: str, ok: bool) -> None:
    """Raise ValueError unless `ok` is True; the message has `name`, `value` and `allowed`."""
    if not ok:
        raise ValueError(f"{name}: got {value!r:.500}, allowed: {allowed}")


def is_integer(value: Any, least: int, most: int = MAX_SIZE) -> bool:
    """Return whether `value` is an integer from `least` to `most`; a bool is not an integer."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def integer_from(least: int, most: int = MAX_SIZE) -> str:
    """Describe the values that `is_integer` allows, for a message."""
    return f"an integer >= {least} and <= {most}"


def is_number(value: Any, least: float, most: float = sys.float_info.max) -> bool:
    """Return whether `value` is a number from `least` to `most`; a bool or NaN is not a number."""
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
    )


@dataclass(frozen=True)
class RelativePositions:
    """Relative positions in the logits of attention (DeBERTa); see ``ops.relative_attention``.

    Args:
        span: Half of the number of rows of the table of positions.
        farthest: Distance in tokens from which on all distances share a row, if distances above
            ``span / 2`` are put into buckets. None means one row for each distance.
        keys: Whether queries are multiplied by keys of the positions (c2p).
        queries: Whether keys are multiplied by queries of the positions (p2c).
        shared: Whether positions have the projections of the content.
        norm: Whether the table has a layer norm.
        interleaved: Whether the projection of the content has the query, key and value of one head
            after another, with biases of the queries and values alone (DeBERTa v1). Positions then
            have projections of their own.

    Raises:
        ValueError: If a value is not allowed. The message names the field.
    """

    span: int
    farthest: int | None = None
    keys: bool = True
    queries: bool = True
    shared: bool = True
    norm: bool = True
    interleaved: bool = False

    def __post_init__(self) -> None:
        """Check the fields."""
        check("span", self.span, integer_from(1), is_integer(self.span, 1))
        farthest, least = self.farthest, self.span // 2 + 2
        fits = farthest is None or (self.span >= 2 and is_integer(farthest, least))
        check("farthest", farthest, f"None or {integer_from(least)}", fits)
        for name in ("keys", "queries", "shared", "norm", "interleaved"):
            value = getattr(self, name)
            check(name, value, "True or False", isinstance(value, bool))
        both = self.shared and self.interleaved
        check("shared", self.shared, "False with an interleaved projection", not both)
        some = self.keys or self.queries
        check("keys, queries", (self.keys, self.queries), "at least one that is True", some)


@dataclass(frozen=True)
class Architecture:
    """The properties in which an encoder may differ from BERT; the defaults describe BERT.

    ``fastbert.io.families`` has the properties of each ``model_type``.

    Args:
        embedding_size: Width of the embedding tables. A projection maps the embeddings to the width
            ``hidden_size``. None means tables of the width ``hidden_size``, without a projection.
        position_table: Whether positions have an embedding table.
        type_table: Whether token types have an embedding table.
        task_types: Number of task types, which have an embedding table as token types do (ERNIE); 0
            means that there is no such table.
        box_positions: Number of the coordinates of boxes on a page, which have embedding tables
            (LayoutLM); 0 means that there are no such tables.
        embedding_norm: Whether the sum of the embeddings has a layer norm.
        first_position: Position of the first token if padding has no positions (RoBERTa). None
            means that the position of a token is its index in the row.
        distance_buckets: Number of buckets of distances between tokens. Each bucket has a learned
            attention bias, which all layers share (MPNet); 0 means no bias.
        distance_slopes: Whether a constant bias of the logits falls linearly with the distance
            between tokens, with a slope for each head (ALiBi, Press et al. 2022).
        relative_positions: Relative positions in the logits of attention; None if there are none.
        rotary_bases: Base of the rotary embedding of each layer; empty without rotary embeddings.
        rotary_table: Whether the encoder has a table with the sines and cosines of each position,
            with which all layers rotate the pairs of neighbouring elements of a head (RoFormer).
        rotary_values: Whether the values are rotated too, if `rotary_table` is set.
        windows: Largest distance, in tokens, between a query and its keys in each layer; -1 allows
            any distance. Empty if no layer has a limit.
        head_dim: Width of one attention head; None means ``hidden_size / num_attention_heads``.
        key_value_heads: Number of heads of the keys and values. As many consecutive heads of the
            queries share each of them (grouped queries, Ainslie et al. 2023). None means
            ``num_attention_heads``.
        attention_scale: Factor of the attention logits; None means ``head_dim ** -0.5``.
        pre_norm: Whether the layer norms are before attention and feed-forward, with another layer
            norm after the last layer (ModernBERT).
        rms_norm: Whether the norms are RMS norms, without a mean and a bias, if `pre_norm` is set
            (T5, EuroBERT).
        first_norm: Whether the first layer has a norm before attention, if `pre_norm` is set.
        gated: Whether the first projection of the feed-forward is twice as wide and its output
            becomes ``act(first half) * second half``.
        attention_bias: Whether the projections of attention have a bias.
        feed_forward_bias: Whether the projections of the feed-forward have a bias.
        gate_bias: Whether the first projection of a gated feed-forward has a bias, if
            `feed_forward_bias` is set.
        norm_bias: Whether the layer norms have a bias.
        pooler: Whether the encoder has a pooler.
        groups: Number of groups of layers that run repeatedly (ALBERT). None means that each layer
            runs once.
        group_size: Number of layers in a group.
        embedding_dropout: Dropout probability after the embeddings; None means
            ``hidden_dropout_prob``.
        attention_output_dropout: Dropout probability after the output projection of attention; None
            means ``hidden_dropout_prob``.
        inner_dropout: Dropout probability between the two projections of the feed-forward.
        output_dropout: Dropout probability after the feed-forward; None means
            ``hidden_dropout_prob``.
        final_dropout: Dropout probability after the norm that follows the last layer.

    Raises:
        ValueError: If a value is not allowed. The message names the field.
    """

    embedding_size: int | None = None
    position_table: bool = True
    type_table: bool = True
    task_types: int = 0
    box_positions: int = 0
    embedding_norm: bool = True
    first_position: int | None = None
    distance_buckets: int = 0
    distance_slopes: bool = False
    relative_positions: RelativePositions | None = None
    rotary_bases: tuple[float, ...] = ()
    rotary_table: bool = False
    rotary_values: bool = False
    windows: tuple[int, ...] = ()
    head_dim: int | None = None
    key_value_heads: int | None = None
    attention_scale: float | None = None
    pre_norm: bool = False
    rms_norm: bool = False
    first_norm: bool = False
    gated: bool = False
    attention_bias: bool = True
    feed_forward_bias: bool = True
    gate_bias: bool = True
    norm_bias: bool = True
    pooler: bool = True
    groups: int | None = None
    group_size: int = 1
    embedding_dropout: float | None = None
    attention_output_dropout: float | None = None
    inner_dropout: float = 0.0
    output_dropout: float | None = None
    final_dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in ("embedding_size", "groups", "head_dim", "key_value_heads"):
            value = getattr(self, name)
            check(name, value, f"None or {integer_from(1)}", value is None or is_integer(value, 1))
        start, buckets = self.first_position, self.distance_buckets
        allowed = f"None or {integer_from(0)}"
        check("first_position", start, allowed, start is None or is_integer(start, 0))
        check("distance_buckets", buckets, integer_from(0), is_integer(buckets, 0))
        tasks, boxes = self.task_types, self.box_positions
        check("task_types", tasks, integer_from(0), is_integer(tasks, 0))
        check("box_positions", boxes, integer_from(0), is_integer(boxes, 0))
        fits = tasks == 0 or self.type_table
        check("task_types", tasks, "0 without a table of token types", fits)
        value = self.rotary_table
        fits = not value or len(self.rotary_bases) > 0
        check("rotary_table", value, "False without rotary_bases", fits)
        value = self.rotary_values
        check("rotary_values", value, "False without rotary_table", not value or self.rotary_table)
        for name in ("first_norm", "rms_norm"):
            value = getattr(self, name)
            check(name, value, "False without pre_norm", not value or self.pre_norm)
        value = self.attention_scale
        check("attention_scale", value, "None or a number", value is None or is_number(value, 0.0))
        slopes, alone = self.distance_slopes, not (buckets or self.relative_positions)
        check("distance_slopes", slopes, "False with other distances", alone or not slopes)
        relative = self.relative_positions
        known = relative is None or isinstance(relative, RelativePositions)
        check("relative_positions", relative, "None or RelativePositions", known)
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
            "embedding_norm",
            "distance_slopes",
            "rotary_table",
            "rotary_values",
            "pre_norm",
            "rms_norm",
            "first_norm",
            "gated",
            "attention_bias",
            "feed_forward_bias",
            "gate_bias",
            "norm_bias",
            "pooler",
        ):
            value = getattr(self, name)
            check(name, value, "True or False", isinstance(value, bool))
        for name in ("embedding_dropout", "attention_output_dropout", "output_dropout"):
            value = getattr(self, name)
            allowed = "None or a number in [0, 1]"
            check(name, value, allowed, value is None or is_number(value, 0.0, 1.0))
        for name in ("inner_dropout", "final_dropout"):
            value = getattr(self, name)
            check(name, value, "a number in [0, 1]", is_number(value, 0.0, 1.0))

    @property
    def measures_distances(self) -> bool:
        """Whether the logits of attention depend on the distance between tokens."""
        biased = self.distance_buckets or self.distance_slopes
        return bool(biased or self.windows or self.relative_positions)

    @property
    def interleaved(self) -> bool:
        """Whether the projection of the content has one head after another (DeBERTa v1)."""
        return self.relative_positions is not None and self.relative_positions.interleaved

    def order(self, layers: int) -> tuple[int, ...]:
        """Return the index of the stored layer that runs at each step of an encoder.

        Args:
            layers: Number of layers of the encoder.

        Returns:
            One index per step. With groups, there are ``layers * group_size`` steps.

        Examples:
            >>> from fastbert.config import Architecture
            >>> Architecture(groups=2).order(4)
            (0, 0, 1, 1)
        """
        if self.groups is None:
            return tuple(range(layers))
        first = (int(i / (layers / self.groups)) * self.group_size for i in range(layers))
        return tuple(start + inner for start in first for inner in range(self.group_size))


@dataclass(frozen=True)
class BertConfig:
    """The configuration of a BERT encoder (Devlin et al. 2019, section 3).

    Args:
        vocab_size: Number of tokens of the vocabulary.
        hidden_size: Width of the hidden states, a multiple of `num_attention_heads`.
        num_hidden_layers: Number of layers.
        num_attention_heads: Number of attention heads.
        intermediate_size: Width between the two projections of the feed-forward.
        hidden_act: Activation of the feed-forward.
        hidden_dropout_prob: Dropout probability of hidden states, in [0, 1].
        attention_probs_dropout_prob: Dropout probability of attention weights, in [0, 1].
        max_position_embeddings: Number of positions. The property `max_length` is the length of the
            longest sequence that the encoder can read.
        type_vocab_size: Number of token types.
        initializer_range: Standard deviation of the initial weights.
        layer_norm_eps: Term that is added to the variance in layer norms.
        pad_token_id: Id of the padding token, or None.
        classifier_dropout: Dropout probability before a classifier, in [0, 1]; None means
            `hidden_dropout_prob`.
        tie_word_embeddings: Whether the masked-LM head uses the word embeddings as its weight.
        num_labels: Number of labels of a classifier.
        problem_type: Loss of a sequence classifier: ``"regression"``,
            ``"single_label_classification"`` or ``"multi_label_classification"``. With None,
            `num_labels` and the dtype of the labels determine the loss.
        model_type: Name of the model family, such as ``"bert"``. The type ``"bert-alibi"`` is that
            of fastbert's own models with ALiBi instead of a table of positions, which transformers
            does not read.
        architecture: Differences of the model family from BERT. By default, they follow from the
            model type ``"bert"`` or ``"bert-alibi"``.
        extra: Keys of a ``config.json`` that are not fields, with their values. A saved checkpoint
            contains these keys again.

    Raises:
        ValueError: If a value is not allowed. The message names the field.

    Examples:
        >>> from fastbert import BertConfig
        >>> config = BertConfig.preset("tiny", vocab_size=8192)
        >>> config.hidden_size, config.num_hidden_layers, config.head_dim
        (128, 2, 64)
        >>> BertConfig.from_dict(config.to_dict()) == config
        True
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
        """Check the fields, and complete the architecture of ``"bert-alibi"``."""
        own = self.model_type == ALIBI
        if own and self.architecture == Architecture():
            slopes = Architecture(position_table=False, distance_slopes=True)
            object.__setattr__(self, "architecture", slopes)
        fits = self.architecture.distance_slopes == own
        check("model_type", self.model_type, f"{ALIBI!r} with distance_slopes, and only then", fits)
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
            "num_labels",
        ):
            value = getattr(self, name)
            check(name, value, integer_from(1), is_integer(value, 1))
        types, least = self.type_vocab_size, 1 if self.architecture.type_table else 0
        check("type_vocab_size", types, integer_from(least), is_integer(types, least))
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
        heads, groups = self.num_attention_heads, self.architecture.key_value_heads or 1
        fits = self.architecture.head_dim is not None or self.hidden_size % heads == 0
        allowed = f"a multiple of num_attention_heads ({heads})"
        check("hidden_size", self.hidden_size, allowed, fits)
        check("key_value_heads", groups, f"a divisor of {heads}", heads % groups == 0)
        if self.pad_token_id is not None:
            value = self.pad_token_id
            allowed = f"None or 0 <= id < vocab_size ({self.vocab_size})"
            check("pad_token_id", value, allowed, is_integer(value, 0, self.vocab_size - 1))
        start = self.architecture.first_position or 0
        value = self.max_position_embeddings
        check("max_position_embeddings", value, f"more than {start}", value > start)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.architecture.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def max_length(self) -> int:
        """Length of the longest sequence that the encoder can read, in tokens."""
        return self.max_position_embeddings - (self.architecture.first_position or 0)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> BertConfig:
        """Return a preset, with some fields replaced.

        Args:
            name: ``"tiny"`` or ``"mini"`` (Turc et al. 2019), or ``"base"`` or ``"large"`` (Devlin
                et al. 2019).
            **overrides: Fields to replace.

        Returns:
            The configuration.

        Raises:
            ValueError: If there is no such preset, or if a value is not allowed.
        """
        check("preset", name, ", ".join(PRESETS), name in PRESETS)
        return cls(**{**PRESETS[name], **overrides})

    def replace(self, **changes: Any) -> BertConfig:
        """Return a copy with some fields replaced; raise ValueError if a value is not allowed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``config.json``, with the keys in `extra`.

        If ``id2label`` does not have `num_labels` names, ``id2label`` and ``label2id`` get default
        names.
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
        """Build a configuration from the content of a ``config.json``.

        Args:
            content: The content as a dictionary. Keys that are not fields are stored in `extra`.
            architecture: Differences of the model family from BERT; None means BERT.
                ``fastbert.io.families`` reads other families.

        Returns:
            The configuration.

        Raises:
            ValueError: If the model is not an encoder that fastbert supports, or if a value is not
                allowed. The message names the key.
        """
        model_type = content.get("model_type", "bert")
        allowed = f"{', '.join(OWN_TYPES)}; fastbert.io.families.read_config reads other families"
        known_type = model_type in OWN_TYPES or architecture is not None
        check("model_type", model_type, allowed, known_type)
        position = content.get("position_embedding_type", "absolute")
        counted = model_type != ALIBI and (architecture is None or architecture.position_table)
        fits = position == "absolute" or not counted
        check("position_embedding_type", position, "absolute", fits)
        for name in ("is_decoder", "add_cross_attention"):
            check(name, content.get(name, False), "false for an encoder", not content.get(name))
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
        """Read the ``config.json`` of a BERT model.

        Args:
            path: Path of the file.

        Returns:
            The configuration.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If the file is not a JSON object, or if a value is not allowed.
        """
        return cls.from_dict(json_file.read(Path(path)))


# The fields of `BertConfig` that are not keys of a config.json.
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
