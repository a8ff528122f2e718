"""The model families: their differences from BERT, and the names of their settings and weights.

There is one table per family. `FAMILIES` has the families that fastbert reads natively, and
`ACCELERATED` has also the encoder of an encoder–decoder, which only ``fastbert.accelerate`` uses.

A module of fastbert, such as ``encoder.layer.{layer}.output.dense``, has the parameters of one
module of transformers, or the concatenated parameters of several modules. ``{layer}`` is the number
of the layer in the checkpoint. In a family that repeats groups of layers, ``{group}`` is the number
of the group, and ``{inner}`` is the number of the layer in its group.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fastbert.config import (
    MAX_LAYERS,
    Architecture,
    BertConfig,
    RelativePositions,
    check,
    integer_from,
    is_integer,
    is_number,
)
from fastbert.io.names import BUFFERS, ENCODER, QKV, modernise

Content = dict[str, Any]
Names = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Family:
    """The table of one model family.

    Attributes:
        model: Class of the encoder in transformers.
        prefix: Prefix of the names of the encoder's weights in a model with a head.
        modules: Modules with parameters: the name in fastbert → the names in transformers.
        dropouts: Modules with dropout: the name in fastbert → the name of the module or attribute
            in transformers that has the dropout probability.
        architecture: Function from the content of ``config.json`` to the differences from BERT.
        settings: Settings whose names differ: the field of `BertConfig` → the key in
            ``config.json``.
        defaults: Values of keys that ``config.json`` may lack.
        lacks: Fields of `BertConfig` that have no key in ``config.json``.
        stored: Modules whose names in a checkpoint differ from those in the model of transformers:
            the name in fastbert → the names in the checkpoint.
    """

    model: str
    prefix: str
    modules: Names
    dropouts: dict[str, str]
    architecture: Callable[[Content], Architecture] = lambda content: Architecture()
    settings: dict[str, str] = field(default_factory=dict)
    defaults: Content = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    stored: Names = field(default_factory=dict)


def family_of(model_type: str) -> Family:
    """Return the table of a model type; raise ValueError for an unknown model type."""
    if not isinstance(model_type, str) or model_type not in ACCELERATED:
        raise ValueError(f"model_type: got {model_type!r}, allowed: {', '.join(ACCELERATED)}")
    return ACCELERATED[model_type]


# Settings


def read_config(content: Content) -> BertConfig:
    """Read the configuration of any family.

    Unknown keys are stored in ``extra`` of the configuration. A key is ignored if it is the name of
    a field of `BertConfig` that the family lacks or names differently.

    Args:
        content: Content of ``config.json``.

    Returns:
        The configuration.

    Raises:
        ValueError: If a value is not allowed. The message names the key.
    """
    model_type = content.get("model_type", "bert")
    family = family_of(model_type)
    content = {**family.defaults, **content}
    ours = {key: name for name, key in family.settings.items()}
    meaningless = {*family.settings, *family.lacks} - {*ours}
    return BertConfig.from_dict(
        {ours.get(key, key): value for key, value in content.items() if key not in meaningless},
        family.architecture(content),
    )


def write_config(config: BertConfig) -> Content:
    """Return the content of ``config.json`` for a configuration; the inverse of `read_config`."""
    family = family_of(config.model_type)
    content = config.to_dict()
    return {
        family.settings.get(key, key): value
        for key, value in content.items()
        if key not in family.lacks
    }


# Weights


def pairs(config: BertConfig, stored: bool = False) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name in fastbert and the names in transformers of each module with parameters.

    Args:
        config: The configuration.
        stored: True yields the names in the checkpoints of the family, and False yields the names
            in the model of transformers.
    """
    family = family_of(config.model_type)
    layers = max(config.architecture.order(config.num_hidden_layers)) + 1
    for name, hf_names in (family.modules | family.stored if stored else family.modules).items():
        if "{layer}" not in name:
            yield name, hf_names
            continue
        for layer in range(layers):
            yield name.format(layer=layer), tuple(place(each, layer, config) for each in hf_names)


def place(name: str, layer: int, config: BertConfig) -> str:
    """Put the number of a layer, as in the checkpoint, into a name of transformers."""
    group, inner = divmod(layer, config.architecture.group_size)
    return name.format(layer=layer, group=group, inner=inner)


def encoder_parts(config: BertConfig) -> set[str]:
    """Return the first parts of the names of an encoder's weights, without the pooler.

    The result contains the first parts in fastbert, in transformers and in checkpoints.
    """
    family = family_of(config.model_type)
    modules = [*family.modules.values(), *family.stored.values()]
    roots = {name.partition(".")[0] for group in modules for name in group}
    return {*ENCODER, *roots} - {"pooler"}


def to_fastbert(tensors: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """Rename the tensors of an encoder to the names of fastbert's state dict.

    Tensors of unknown modules keep their names. If some names have the prefix of the family, the
    tensors without the prefix belong to the head and are left out. Tensors of ALBERT's layers that
    never run are left out too.

    Args:
        tensors: The tensors by their names in the checkpoint.
        config: The configuration.

    Returns:
        The tensors by their new names.
    """
    prefix = family_of(config.model_type).prefix
    if any(name.startswith(prefix) for name in tensors):
        tensors = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    left = {
        modernise(name): tensor
        for name, tensor in tensors.items()
        if name not in BUFFERS and not _never_runs(name, config)
    }
    for stored in (True, False):
        left = _renamed(
            left, ((hf_names, _in_state(name, config)) for name, hf_names in pairs(config, stored))
        )
    return left


def _never_runs(name: str, config: BertConfig) -> bool:
    """Return whether a weight belongs to a layer of ALBERT that never runs.

    The last groups of layers never run if ``num_hidden_layers`` is less than the number of groups.
    """
    choices, match = config.architecture, _SHARED_LAYER.match(name)
    if choices.groups is None or match is None:
        return False
    group, inner = int(match[1]), int(match[2])
    last = max(choices.order(config.num_hidden_layers))
    exists = group < choices.groups and inner < choices.group_size
    return exists and group * choices.group_size + inner > last


def to_transformers(tensors: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """Rename tensors to their names in a checkpoint; the inverse of `to_fastbert`."""
    names = ((_in_state(name, config), others) for name, others in pairs(config, stored=True))
    return _renamed(dict(tensors), names)


def _in_state(module: str, config: BertConfig) -> tuple[str, ...]:
    """Return the names of a module in fastbert's state dict.

    The fused projection ``qkv`` has three names, ``query``, ``key`` and ``value``, unless it is
    interleaved.
    """
    parent, _, name = module.rpartition(".")
    if name != "qkv" or config.architecture.interleaved:
        return (module,)
    return tuple(f"{parent}.{part}" for part in QKV)


def _renamed(left: dict[str, Tensor], names: Iterator[tuple[tuple[str, ...], tuple[str, ...]]]):
    named: dict[str, Tensor] = {}
    for old, new in names:
        for kind in ("weight", "bias"):
            parts = [left.pop(f"{name}.{kind}", None) for name in old]
            present = [part for part in parts if part is not None]
            if len(present) < len(old):
                continue  # The caller reports missing weights.
            if len(old) == len(new):
                renamed = present
            else:
                whole = torch.cat(present)
                renamed = [part.contiguous() for part in whole.chunk(len(new))]
            named |= {f"{name}.{kind}": part for name, part in zip(new, renamed, strict=True)}
    return named | left


# The tables


def _layers(content: Content) -> int:
    """Return ``num_hidden_layers``, or raise ValueError before a caller builds a list of layers."""
    layers = content["num_hidden_layers"]
    allowed = integer_from(1, MAX_LAYERS)
    check("num_hidden_layers", layers, allowed, is_integer(layers, 1, MAX_LAYERS))
    return layers


def _rotary(content: Content, name: str, default: float) -> float:
    """Return the base of the rotary embedding of one kind of layer.

    Raises:
        ValueError: If the embedding is scaled or partial.
    """
    given = content.get("rope_parameters") or {}
    parameters = given.get(name, given) or {} if isinstance(given, dict) else given
    check("rope_parameters", given, "an object", isinstance(parameters, dict))
    kind = parameters.get("rope_type", "default")
    if kind != "default" or content.get("rope_scaling"):
        raise ValueError(f"rope_parameters: got rope_type {kind!r}, allowed: 'default', unscaled")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor: got a part of the head, allowed: 1.0")
    base = parameters.get("rope_theta", default)
    check("rope_theta", base, "a number >= 1", is_number(base, 1.0))
    return float(base)


def _after_padding(content: Content) -> Architecture:
    padding = content["pad_token_id"]
    check("pad_token_id", padding, integer_from(0), is_integer(padding, 0))
    return Architecture(first_position=padding + 1)


def _electra(content: Content) -> Architecture:
    narrow = content["embedding_size"] != content["hidden_size"]
    return Architecture(embedding_size=content["embedding_size"] if narrow else None, pooler=False)


def _albert(content: Content) -> Architecture:
    return Architecture(
        embedding_size=content["embedding_size"],
        groups=content["num_hidden_groups"],
        group_size=content["inner_group_num"],
        output_dropout=0.0,
    )


def _distilbert(content: Content) -> Architecture:
    return Architecture(type_table=False, attention_output_dropout=0.0, pooler=False)


def _mpnet(content: Content) -> Architecture:
    buckets = content["relative_attention_num_buckets"]
    if buckets != 32:  # transformers always computes with 32 buckets.
        raise ValueError(f"relative_attention_num_buckets: got {buckets}, allowed: 32")
    # The first position of MPNet is 2, independently of pad_token_id.
    return Architecture(type_table=False, first_position=2, distance_buckets=buckets)


def _deberta_v2(content: Content) -> Architecture:
    for name, allowed in (
        ("conv_kernel_size", (0, None)),
        ("embedding_size", (None, content["hidden_size"])),
        ("attention_head_size", (None, content["hidden_size"] // content["num_attention_heads"])),
    ):
        value = content.get(name)
        # A convolution after the first layer (v2-xlarge) is not implemented.
        check(name, value, " or ".join(map(str, allowed)), value in allowed)
    given = content["pos_att_type"] or []
    terms = given.lower().split("|") if isinstance(given, str) else given
    terms = [term.strip() for term in terms if term]
    check("pos_att_type", given, "c2p, p2c, or both", set(terms) <= {"c2p", "p2c"})
    relative = content["relative_attention"]
    check("relative_attention", relative, "True or False", isinstance(relative, bool))
    # With terms, but without relative attention, transformers scales the logits as with the terms.
    check("relative_attention", relative, "True if pos_att_type is given", relative or not terms)
    types = content["type_vocab_size"]
    return Architecture(
        position_table=content["position_biased_input"],
        type_table=types != 0,
        relative_positions=_relative(content, terms) if terms else None,
        pooler=False,
    )


def _deberta(content: Content) -> Architecture:
    for name, only in (("talking_head", False), ("relative_attention", True)):
        value = content.get(name, False)
        check(name, value, str(only), value is only)
    # DeBERTa v1 lacks these choices of v2, and ignores their keys.
    absent = {"conv_kernel_size": None, "attention_head_size": None, "position_buckets": -1}
    choices = _deberta_v2(content | absent | {"norm_rel_ebd": "none", "share_att_key": False})
    terms = choices.relative_positions
    if terms is None:
        raise ValueError("pos_att_type: got no terms, allowed: c2p, p2c, or both")
    return replace(choices, relative_positions=replace(terms, interleaved=True))


def _relative(content: Content, terms: list[str]) -> RelativePositions:
    farthest = content["max_relative_positions"]
    if is_integer(farthest, -MAX_LAYERS, 0):
        farthest = content["max_position_embeddings"]
    buckets = content["position_buckets"]
    check("max_relative_positions", farthest, integer_from(1), is_integer(farthest, 1))
    check("position_buckets", buckets, "an integer", is_integer(buckets, -MAX_LAYERS))
    norms = [name.strip() for name in content["norm_rel_ebd"].lower().split("|")]
    return RelativePositions(
        span=buckets if buckets > 0 else farthest,
        farthest=farthest if buckets > 0 else None,
        keys="c2p" in terms,
        queries="p2c" in terms,
        shared=content["share_att_key"],
        norm="layer_norm" in norms,
    )


def _nomic(content: Content) -> Architecture:
    dim, heads = content["head_dim"], content["num_attention_heads"]
    if dim is not None and dim * heads != content["hidden_size"]:
        raise ValueError(f"head_dim: got {content['head_dim']}, allowed: hidden_size / heads")
    base = _rotary(content, "", 1000.0)
    return Architecture(
        position_table=False,
        rotary_bases=(base,) * _layers(content),
        gated=True,
        attention_bias=False,
        feed_forward_bias=False,
        pooler=False,
    )


def _modernbert(content: Content) -> Architecture:
    layers, every = _layers(content), content.get("global_attn_every_n_layers", 3)
    check("global_attn_every_n_layers", every, integer_from(1), is_integer(every, 1))
    kinds = content.get("layer_types") or [
        "sliding_attention" if i % every else "full_attention" for i in range(layers)
    ]
    bases = {
        "full_attention": content.get("global_rope_theta", 160_000.0),
        "sliding_attention": content.get("local_rope_theta", 10_000.0),
    }
    unknown = set(kinds) - set(bases)
    if unknown or len(kinds) != layers:
        raise ValueError(f"layer_types: got {kinds}, allowed: {layers} of {', '.join(bases)}")
    reach = content["local_attention"]
    check("local_attention", reach, integer_from(0), is_integer(reach, 0))
    window = reach // 2
    return Architecture(
        position_table=False,
        type_table=False,
        rotary_bases=tuple(_rotary(content, kind, bases[kind]) for kind in kinds),
        windows=tuple(window if kind == "sliding_attention" else -1 for kind in kinds),
        pre_norm=True,
        gated=True,
        attention_bias=content["attention_bias"],
        feed_forward_bias=content["mlp_bias"],
        norm_bias=content["norm_bias"],
        embedding_dropout=content["embedding_dropout"],
        attention_output_dropout=content["attention_dropout"],
        inner_dropout=content["mlp_dropout"],
        output_dropout=0.0,
        pooler=False,
    )


def _marian(content: Content) -> Architecture:
    skipped = content["encoder_layerdrop"]
    check("encoder_layerdrop", skipped, "0.0", skipped == 0)
    return Architecture(type_table=False, inner_dropout=content["activation_dropout"], pooler=False)


def _same(*names: str) -> Names:
    return {name: (name,) for name in names}


LAYER = "encoder.layer.{layer}."
_QKV = LAYER + "attention.self.qkv"
_POSITIONS = LAYER + "attention.self.positions"
_ATTENTION = LAYER + "attention.output.dense"
_ATTENTION_NORM = LAYER + "attention.output.LayerNorm"
_FIRST = LAYER + "intermediate.dense"
_SECOND = LAYER + "output.dense"
_NORM = LAYER + "output.LayerNorm"
_EMBEDDINGS = _same(
    "embeddings.word_embeddings",
    "embeddings.position_embeddings",
    "embeddings.token_type_embeddings",
    "embeddings.LayerNorm",
)
_WITHOUT_TYPES = {
    name: hf_names for name, hf_names in _EMBEDDINGS.items() if "token_type" not in name
}
_POOLER = _same("pooler.dense")
_BERT: Names = {
    **_EMBEDDINGS,
    _QKV: tuple(f"{LAYER}attention.self.{part}" for part in QKV),
    **_same(_ATTENTION, _ATTENTION_NORM, _FIRST, _SECOND, _NORM),
    **_POOLER,
}
_BERT_DROPOUTS = {
    "embeddings": "embeddings.dropout",
    LAYER + "attention.self": LAYER + "attention.self.dropout",
    _ATTENTION_NORM: LAYER + "attention.output.dropout",
    _NORM: LAYER + "output.dropout",
}
_ALBERT_LAYER = "encoder.albert_layer_groups.{group}.albert_layers.{inner}."
_SHARED_LAYER = re.compile(r"encoder\.albert_layer_groups\.(\d+)\.albert_layers\.(\d+)\.")
_DISTILBERT_LAYER = "transformer.layer.{layer}."
_LAYERS = "layers.{layer}."


def _roberta(model: str, **defaults: Any) -> Family:
    defaults["pad_token_id"] = 1
    return Family(model, "roberta.", _BERT, _BERT_DROPOUTS, _after_padding, defaults=defaults)


FAMILIES: dict[str, Family] = {
    "bert": Family("BertModel", "bert.", _BERT, _BERT_DROPOUTS),
    "roberta": _roberta("RobertaModel", vocab_size=50265),
    "xlm-roberta": _roberta("XLMRobertaModel"),
    "camembert": _roberta("CamembertModel"),
    "electra": Family(
        "ElectraModel",
        "electra.",
        {**_BERT, "embeddings.projection": ("embeddings_project",)},
        _BERT_DROPOUTS,
        _electra,
        defaults={
            "embedding_size": 128,
            "hidden_size": 256,
            "num_attention_heads": 4,
            "intermediate_size": 1024,
        },
    ),
    "albert": Family(
        "AlbertModel",
        "albert.",
        {
            **_EMBEDDINGS,
            "embeddings.projection": ("encoder.embedding_hidden_mapping_in",),
            _QKV: tuple(f"{_ALBERT_LAYER}attention.{part}" for part in QKV),
            _ATTENTION: (f"{_ALBERT_LAYER}attention.dense",),
            _ATTENTION_NORM: (f"{_ALBERT_LAYER}attention.LayerNorm",),
            _FIRST: (f"{_ALBERT_LAYER}ffn",),
            _SECOND: (f"{_ALBERT_LAYER}ffn_output",),
            _NORM: (f"{_ALBERT_LAYER}full_layer_layer_norm",),
            "pooler.dense": ("pooler",),
        },
        {
            "embeddings": "embeddings.dropout",
            LAYER + "attention.self": f"{_ALBERT_LAYER}attention.attention_dropout",
            _ATTENTION_NORM: f"{_ALBERT_LAYER}attention.output_dropout",
        },
        _albert,
        defaults={
            "vocab_size": 30000,
            "embedding_size": 128,
            "hidden_size": 4096,
            "num_hidden_groups": 1,
            "inner_group_num": 1,
            "num_attention_heads": 64,
            "intermediate_size": 16384,
            "hidden_act": "gelu_new",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        lacks=("classifier_dropout",),
    ),
    "distilbert": Family(
        "DistilBertModel",
        "distilbert.",
        {
            **_WITHOUT_TYPES,
            _QKV: tuple(f"{_DISTILBERT_LAYER}attention.{part}_lin" for part in "qkv"),
            _ATTENTION: (f"{_DISTILBERT_LAYER}attention.out_lin",),
            _ATTENTION_NORM: (f"{_DISTILBERT_LAYER}sa_layer_norm",),
            _FIRST: (f"{_DISTILBERT_LAYER}ffn.lin1",),
            _SECOND: (f"{_DISTILBERT_LAYER}ffn.lin2",),
            _NORM: (f"{_DISTILBERT_LAYER}output_layer_norm",),
        },
        {
            "embeddings": "embeddings.dropout",
            LAYER + "attention.self": f"{_DISTILBERT_LAYER}attention.dropout",
            _NORM: f"{_DISTILBERT_LAYER}ffn.dropout",
        },
        _distilbert,
        settings={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
            "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
        },
        defaults={"n_layers": 6},
        lacks=("type_vocab_size", "layer_norm_eps", "classifier_dropout"),
    ),
    "mpnet": Family(
        "MPNetModel",
        "mpnet.",
        {
            **_WITHOUT_TYPES,
            _QKV: tuple(f"{LAYER}attention.attn.{part}" for part in "qkv"),
            _ATTENTION: (f"{LAYER}attention.attn.o",),
            _ATTENTION_NORM: (f"{LAYER}attention.LayerNorm",),
            **_same(_FIRST, _SECOND, _NORM, "encoder.relative_attention_bias"),
            **_POOLER,
        },
        {
            "embeddings": "embeddings.dropout",
            LAYER + "attention.self": f"{LAYER}attention.attn.dropout",
            _ATTENTION_NORM: f"{LAYER}attention.dropout",
            _NORM: f"{LAYER}output.dropout",
        },
        _mpnet,
        defaults={"vocab_size": 30527, "pad_token_id": 1, "relative_attention_num_buckets": 32},
        lacks=("type_vocab_size", "classifier_dropout"),
    ),
    "nomic_bert": Family(
        "NomicBertModel",
        "nomic_bert.",
        {
            **{name: hf_names for name, hf_names in _EMBEDDINGS.items() if "position" not in name},
            _QKV: tuple(f"{_LAYERS}self_attn.{part}_proj" for part in "qkv"),
            _ATTENTION: (f"{_LAYERS}self_attn.o_proj",),
            _ATTENTION_NORM: (f"{_LAYERS}post_attention_layernorm",),
            _FIRST: (f"{_LAYERS}mlp.gate_proj", f"{_LAYERS}mlp.up_proj"),
            _SECOND: (f"{_LAYERS}mlp.down_proj",),
            _NORM: (f"{_LAYERS}post_mlp_layernorm",),
            **_POOLER,
        },
        {
            "embeddings": "embeddings.dropout",
            LAYER + "attention.self": f"{_LAYERS}self_attn.attention_dropout",
            _ATTENTION_NORM: f"{_LAYERS}post_attention_dropout",
            _NORM: f"{_LAYERS}post_mlp_dropout",
        },
        _nomic,
        defaults={
            "vocab_size": 30528,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "hidden_act": "silu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "max_position_embeddings": 2048,
            "head_dim": None,
        },
        stored={
            "embeddings.LayerNorm": ("emb_ln",),
            _QKV: (f"encoder.{_LAYERS}attn.Wqkv",),
            _ATTENTION: (f"encoder.{_LAYERS}attn.out_proj",),
            _ATTENTION_NORM: (f"encoder.{_LAYERS}norm1",),
            _FIRST: (f"encoder.{_LAYERS}mlp.fc12", f"encoder.{_LAYERS}mlp.fc11"),
            _SECOND: (f"encoder.{_LAYERS}mlp.fc2",),
            _NORM: (f"encoder.{_LAYERS}norm2",),
        },
    ),
    "deberta-v2": Family(
        "DebertaV2Model",
        "deberta.",
        {
            **_EMBEDDINGS,
            "encoder.relative_positions.embeddings": ("encoder.rel_embeddings",),
            "encoder.relative_positions.LayerNorm": ("encoder.LayerNorm",),
            _QKV: tuple(f"{LAYER}attention.self.{part}_proj" for part in QKV),
            f"{_POSITIONS}.key": (f"{LAYER}attention.self.pos_key_proj",),
            f"{_POSITIONS}.query": (f"{LAYER}attention.self.pos_query_proj",),
            **_same(_ATTENTION, _ATTENTION_NORM, _FIRST, _SECOND, _NORM),
        },
        {**_BERT_DROPOUTS, _POSITIONS: f"{LAYER}attention.self.pos_dropout"},
        _deberta_v2,
        defaults={
            "vocab_size": 128100,
            "hidden_size": 1536,
            "num_hidden_layers": 24,
            "num_attention_heads": 24,
            "intermediate_size": 6144,
            "type_vocab_size": 0,
            "layer_norm_eps": 1e-7,
            "relative_attention": False,
            "max_position_embeddings": 512,
            "max_relative_positions": -1,
            "position_biased_input": True,
            "position_buckets": -1,
            "pos_att_type": None,
            "share_att_key": False,
            "norm_rel_ebd": "none",
        },
        lacks=("classifier_dropout",),
    ),
    "deberta": Family(
        "DebertaModel",
        "deberta.",
        {
            **_EMBEDDINGS,
            "encoder.relative_positions.embeddings": ("encoder.rel_embeddings",),
            LAYER + "attention.self": (LAYER + "attention.self",),
            _QKV: (LAYER + "attention.self.in_proj",),
            f"{_POSITIONS}.key": (f"{LAYER}attention.self.pos_proj",),
            f"{_POSITIONS}.query": (f"{LAYER}attention.self.pos_q_proj",),
            **_same(_ATTENTION, _ATTENTION_NORM, _FIRST, _SECOND, _NORM),
        },
        {**_BERT_DROPOUTS, _POSITIONS: f"{LAYER}attention.self.pos_dropout"},
        _deberta,
        defaults={
            "vocab_size": 50265,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "type_vocab_size": 0,
            "layer_norm_eps": 1e-7,
            "relative_attention": False,
            "max_position_embeddings": 512,
            "max_relative_positions": -1,
            "position_biased_input": True,
            "pos_att_type": None,
        },
        lacks=("classifier_dropout",),
    ),
    "modernbert": Family(
        "ModernBertModel",
        "model.",
        {
            "embeddings.word_embeddings": ("embeddings.tok_embeddings",),
            "embeddings.LayerNorm": ("embeddings.norm",),
            _QKV: (f"{_LAYERS}attn.Wqkv",),
            _ATTENTION: (f"{_LAYERS}attn.Wo",),
            _ATTENTION_NORM: (f"{_LAYERS}attn_norm",),
            _FIRST: (f"{_LAYERS}mlp.Wi",),
            _SECOND: (f"{_LAYERS}mlp.Wo",),
            _NORM: (f"{_LAYERS}mlp_norm",),
            "encoder.final_norm": ("final_norm",),
        },
        {
            "embeddings": "embeddings.drop",
            LAYER + "attention.self": f"{_LAYERS}attn.attention_dropout",
            LAYER[:-1]: f"{_LAYERS}attn.out_drop",
            LAYER + "output": f"{_LAYERS}mlp.drop",
        },
        _modernbert,
        settings={
            "hidden_act": "hidden_activation",
            "layer_norm_eps": "norm_eps",
            "attention_probs_dropout_prob": "attention_dropout",
        },
        defaults={
            "vocab_size": 50368,
            "intermediate_size": 1152,
            "num_hidden_layers": 22,
            "max_position_embeddings": 8192,
            "norm_eps": 1e-5,
            "norm_bias": False,
            "pad_token_id": 50283,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "local_attention": 128,
            "embedding_dropout": 0.0,
            "mlp_bias": False,
            "mlp_dropout": 0.0,
        },
        lacks=("type_vocab_size", "hidden_dropout_prob"),
    ),
}
# The encoders that `fastbert.accelerate` serves.
ACCELERATED: dict[str, Family] = {
    **FAMILIES,
    "marian": Family(
        "MarianEncoder",
        "model.encoder.",
        {
            "embeddings.word_embeddings": ("embed_tokens",),
            "embeddings.position_embeddings": ("embed_positions",),
            _QKV: tuple(f"{_LAYERS}self_attn.{part}_proj" for part in "qkv"),
            _ATTENTION: (f"{_LAYERS}self_attn.out_proj",),
            _ATTENTION_NORM: (f"{_LAYERS}self_attn_layer_norm",),
            _FIRST: (f"{_LAYERS}fc1",),
            _SECOND: (f"{_LAYERS}fc2",),
            _NORM: (f"{_LAYERS}final_layer_norm",),
        },
        {
            "embeddings": "dropout",
            LAYER + "attention.self": f"{_LAYERS}self_attn.dropout",
            _ATTENTION_NORM: f"{_LAYERS}dropout",
            LAYER + "output": f"{_LAYERS}activation_dropout",
            _NORM: f"{_LAYERS}dropout",
        },
        _marian,
        settings={
            "hidden_size": "d_model",
            "num_hidden_layers": "encoder_layers",
            "num_attention_heads": "encoder_attention_heads",
            "intermediate_size": "encoder_ffn_dim",
            "hidden_act": "activation_function",
            "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
            "initializer_range": "init_std",
        },
        defaults={
            "encoder_layerdrop": 0.0,
            "activation_dropout": 0.0,
            "layer_norm_eps": 1e-5,
        },
        lacks=("type_vocab_size", "classifier_dropout"),
    ),
}
