"""The model families: their differences from BERT, and the names of their settings and weights.

There is one table per family. `FAMILIES` has the families of transformers that fastbert reads
natively, and `OWN` has fastbert's own model types. `ACCELERATED` has also the encoders that only
``fastbert.accelerate`` uses.

A module of fastbert, such as ``encoder.layer.{layer}.output.dense``, has the parameters of one
module of transformers, or the concatenated parameters of several modules. ``{layer}`` is the number
of the layer in the checkpoint. In a family that repeats groups of layers, ``{group}`` is the number
of the group, and ``{inner}`` is the number of the layer in its group.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastbert.config import ALIBI, Architecture, BertConfig
from fastbert.io import architectures
from fastbert.io.architectures import Content
from fastbert.io.names import BUFFERS, ENCODER, QKV, modernise

Names = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Family:
    """The table of one model family.

    Attributes:
        model: Class of the encoder in transformers.
        prefix: Prefix of the names of the encoder's weights in a model with a head.
        modules: Modules with parameters: the name in fastbert → the names in transformers.
        dropouts: Modules with dropout: the name in fastbert → the name of the module or attribute
            in transformers that has the dropout probability. The name in fastbert is that of a
            module with the attribute ``dropout_p``, or that of another attribute of a module.
        architecture: Function from the content of ``config.json`` to the differences from BERT.
        settings: Settings whose names differ: the field of `BertConfig` → the key in
            ``config.json``.
        defaults: Values of keys that ``config.json`` may lack.
        lacks: Fields of `BertConfig` that have no key in ``config.json``.
        stored: Modules whose names in a checkpoint differ from those in the model of transformers:
            the name in fastbert → the names in the checkpoint.
        exchanged: Modules in `stored` whose tensors have their halves in the opposite order in a
            checkpoint.
        former: Other prefixes that the names of the encoder's weights may have in a checkpoint.
        gated: Modules whose names differ if the feed-forward is gated.
        own_embedding: Whether the embedding computes more than a sum of tables and a norm, so that
            an accelerated model calls it. Such a model of transformers takes ``inputs_embeds`` as
            the input of its layers.
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
    exchanged: tuple[str, ...] = ()
    former: tuple[str, ...] = ()
    gated: Names = field(default_factory=dict)
    own_embedding: bool = False


def family_of(model_type: str) -> Family:
    """Return the table of a model type; raise ValueError for an unknown model type."""
    if not isinstance(model_type, str) or model_type not in _KNOWN:
        raise ValueError(f"model_type: got {model_type!r}, allowed: {', '.join(_KNOWN)}")
    return _KNOWN[model_type]


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
    modules = family.modules | (family.gated if config.architecture.gated else {})
    for name, hf_names in (modules | family.stored if stored else modules).items():
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
    family = family_of(config.model_type)
    for prefix in (family.prefix, *family.former):
        if any(name.startswith(prefix) for name in tensors):
            own = {n: t for n, t in tensors.items() if n.startswith(prefix)}
            tensors = {name.removeprefix(prefix): tensor for name, tensor in own.items()}
            break
    left = {
        modernise(name): tensor
        for name, tensor in tensors.items()
        if name not in BUFFERS and not _never_runs(name, config)
    }
    for stored in (True, False):
        exchanged = _exchanged(config) if stored else set()
        names = ((hf_names, _in_state(name, config)) for name, hf_names in pairs(config, stored))
        left = _renamed(left, names, exchanged)
    return left


def _exchanged(config: BertConfig) -> set[str]:
    """Return the names in a checkpoint of the modules whose halves are in the opposite order."""
    family = family_of(config.model_type)
    return {
        place(family.stored[name][0], layer, config)
        for name in family.exchanged
        for layer in range(config.num_hidden_layers)
    }


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
    return _renamed(dict(tensors), names, _exchanged(config))


def _in_state(module: str, config: BertConfig) -> tuple[str, ...]:
    """Return the names of a module in fastbert's state dict.

    The fused projection ``qkv`` has three names, ``query``, ``key`` and ``value``, unless it is
    interleaved.
    """
    parent, _, name = module.rpartition(".")
    if name != "qkv" or config.architecture.interleaved:
        return (module,)
    return tuple(f"{parent}.{part}" for part in QKV)


def _renamed(
    left: dict[str, Tensor],
    names: Iterator[tuple[tuple[str, ...], tuple[str, ...]]],
    exchanged: set[str],
) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for old, new in names:
        for kind in ("weight", "bias"):
            parts = [left.pop(f"{name}.{kind}", None) for name in old]
            present = [part for part in parts if part is not None]
            if len(present) < len(old):
                continue  # The caller reports missing weights.
            if len(old) == len(new):
                renamed = present
                if not exchanged.isdisjoint((*old, *new)):
                    renamed = [torch.cat(part.chunk(2)[::-1]) for part in present]
            else:
                whole = torch.cat(present)
                renamed = [part.contiguous() for part in whole.chunk(len(new))]
            named |= {f"{name}.{kind}": part for name, part in zip(new, renamed, strict=True)}
    return named | left


# The tables


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
_WITHOUT_POSITIONS = {
    name: hf_names for name, hf_names in _BERT.items() if name != "embeddings.position_embeddings"
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
_BLOCK = "block.{layer}.layer."
_WITHOUT_NORM = {name: names for name, names in _BERT.items() if name != "embeddings.LayerNorm"}
# The dropout before the second residual addition of a layer belongs to the layer itself.
_PRE_NORM_DROPOUTS = {
    "embeddings": "embeddings.dropout",
    LAYER + "attention.self": LAYER + "attention.self.dropout",
    LAYER[:-1]: LAYER + "attention.output.dropout",
    LAYER + "output_dropout_p": LAYER + "output.dropout",
}
# The modules that the families with rotary positions and norms after the blocks share.
_ROTARY_LAYERS: Names = {
    **{name: hf_names for name, hf_names in _EMBEDDINGS.items() if "position" not in name},
    _QKV: tuple(f"{_LAYERS}self_attn.{part}_proj" for part in "qkv"),
    _ATTENTION: (f"{_LAYERS}self_attn.o_proj",),
    _ATTENTION_NORM: (f"{_LAYERS}post_attention_layernorm",),
    _NORM: (f"{_LAYERS}post_mlp_layernorm",),
    **_POOLER,
}
_ROTARY_DROPOUTS = {
    "embeddings": "embeddings.dropout",
    LAYER + "attention.self": f"{_LAYERS}self_attn.attention_dropout",
    _ATTENTION_NORM: f"{_LAYERS}post_attention_dropout",
    _NORM: f"{_LAYERS}post_mlp_dropout",
}


def _roberta(model: str, prefix: str = "roberta.", **defaults: Any) -> Family:
    defaults["pad_token_id"] = 1
    reader = architectures.after_padding
    return Family(model, prefix, _BERT, _BERT_DROPOUTS, reader, defaults=defaults)


FAMILIES: dict[str, Family] = {
    "bert": Family("BertModel", "bert.", _BERT, _BERT_DROPOUTS),
    "roberta": _roberta("RobertaModel", vocab_size=50265),
    "xlm-roberta": _roberta("XLMRobertaModel"),
    "camembert": _roberta("CamembertModel"),
    "data2vec-text": _roberta("Data2VecTextModel", "data2vec_text."),
    "ernie": Family(
        "ErnieModel",
        "ernie.",
        {**_BERT, **_same("embeddings.task_type_embeddings")},
        _BERT_DROPOUTS,
        architectures.ernie,
        defaults={"use_task_id": False, "task_type_vocab_size": 3},
    ),
    "layoutlm": Family(
        "LayoutLMModel",
        "layoutlm.",
        {**_BERT, **_same(*(f"embeddings.{side}_position_embeddings" for side in "xyhw"))},
        {**_BERT_DROPOUTS, LAYER + "attention.self": LAYER + "attention.self.attention_dropout"},
        architectures.layoutlm,
        defaults={"max_2d_position_embeddings": 1024},
        lacks=("classifier_dropout",),
    ),
    "roberta-prelayernorm": Family(
        "RobertaPreLayerNormModel",
        "roberta_prelayernorm.",
        {
            **_BERT,
            _ATTENTION_NORM: (f"{LAYER}attention.LayerNorm",),
            _NORM: (f"{LAYER}intermediate.LayerNorm",),
            "encoder.final_norm": ("LayerNorm",),
        },
        _PRE_NORM_DROPOUTS,
        architectures.roberta_pre_norm,
        defaults={"vocab_size": 50265, "pad_token_id": 1},
    ),
    "xlm-roberta-xl": Family(
        "XLMRobertaXLModel",
        "roberta.",
        {
            **_WITHOUT_NORM,
            _ATTENTION_NORM: (f"{LAYER}attention.self_attn_layer_norm",),
            _NORM: (f"{LAYER}LayerNorm",),
            "encoder.final_norm": ("encoder.LayerNorm",),
        },
        {name: drop for name, drop in _PRE_NORM_DROPOUTS.items() if "output_dropout" not in name},
        architectures.xlm_roberta_xl,
        defaults={
            "vocab_size": 250880,
            "hidden_size": 2560,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "intermediate_size": 10240,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
            "pad_token_id": 1,
        },
    ),
    "megatron-bert": Family(
        "MegatronBertModel",
        "bert.",
        {
            **_WITHOUT_NORM,
            _ATTENTION_NORM: (f"{LAYER}attention.ln",),
            _NORM: (f"{LAYER}ln",),
            "encoder.final_norm": ("encoder.ln",),
        },
        _PRE_NORM_DROPOUTS,
        architectures.megatron,
        defaults={
            "vocab_size": 29056,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        lacks=("classifier_dropout",),
    ),
    "gte": Family(
        "GteModel",
        "gte.",
        {
            **_ROTARY_LAYERS,
            _FIRST: (f"{_LAYERS}mlp.gate_proj", f"{_LAYERS}mlp.up_proj"),
            _SECOND: (f"{_LAYERS}mlp.down_proj",),
        },
        {**_ROTARY_DROPOUTS, LAYER + "output": f"{_LAYERS}mlp.dropout"},
        architectures.gte,
        defaults={
            "vocab_size": 250048,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.0,
            "max_position_embeddings": 8192,
            "type_vocab_size": 1,
            "pad_token_id": 1,
        },
        stored={
            _QKV: (f"{LAYER}attention.qkv_proj",),
            _ATTENTION: (f"{LAYER}attention.o_proj",),
            _ATTENTION_NORM: (f"{LAYER}attn_ln",),
            _FIRST: (f"{LAYER}mlp.up_gate_proj",),
            _SECOND: (f"{LAYER}mlp.down_proj",),
            _NORM: (f"{LAYER}mlp_ln",),
        },
        exchanged=(_FIRST,),
        former=("new.",),
    ),
    "jina_embeddings_v3": Family(
        "JinaEmbeddingsV3Model",
        "roberta.",
        {
            **_ROTARY_LAYERS,
            _FIRST: (f"{_LAYERS}mlp.fc1",),
            _SECOND: (f"{_LAYERS}mlp.fc2",),
        },
        _ROTARY_DROPOUTS,
        architectures.jina,
        defaults={
            "vocab_size": 250002,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "max_position_embeddings": 8194,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
            "pad_token_id": 1,
        },
        stored={
            "embeddings.LayerNorm": ("emb_ln",),
            _QKV: (f"encoder.{_LAYERS}mixer.Wqkv",),
            _ATTENTION: (f"encoder.{_LAYERS}mixer.out_proj",),
            _ATTENTION_NORM: (f"encoder.{_LAYERS}norm1",),
            _FIRST: (f"encoder.{_LAYERS}mlp.fc1",),
            _SECOND: (f"encoder.{_LAYERS}mlp.fc2",),
            _NORM: (f"encoder.{_LAYERS}norm2",),
        },
    ),
    "roformer": Family(
        "RoFormerModel",
        "roformer.",
        {
            **{name: names for name, names in _WITHOUT_POSITIONS.items() if name not in _POOLER},
            "embeddings.projection": ("embeddings_project",),
            "encoder.rotary_table": ("encoder.embed_positions",),
        },
        _BERT_DROPOUTS,
        architectures.roformer,
        defaults={
            "vocab_size": 50000,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "embedding_size": None,
            "max_position_embeddings": 1536,
            "rotary_value": False,
        },
        lacks=("classifier_dropout",),
    ),
    "electra": Family(
        "ElectraModel",
        "electra.",
        {**_BERT, "embeddings.projection": ("embeddings_project",)},
        _BERT_DROPOUTS,
        architectures.electra,
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
        architectures.albert,
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
        architectures.distilbert,
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
        architectures.mpnet,
        defaults={"vocab_size": 30527, "pad_token_id": 1, "relative_attention_num_buckets": 32},
        lacks=("type_vocab_size", "classifier_dropout"),
    ),
    "nomic_bert": Family(
        "NomicBertModel",
        "nomic_bert.",
        {
            **_ROTARY_LAYERS,
            _FIRST: (f"{_LAYERS}mlp.gate_proj", f"{_LAYERS}mlp.up_proj"),
            _SECOND: (f"{_LAYERS}mlp.down_proj",),
        },
        _ROTARY_DROPOUTS,
        architectures.nomic,
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
        architectures.deberta_v2,
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
        architectures.deberta,
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
    "eurobert": Family(
        "EuroBertModel",
        "model.",
        {
            "embeddings.word_embeddings": ("embed_tokens",),
            _QKV: tuple(f"{_LAYERS}self_attn.{part}_proj" for part in "qkv"),
            _ATTENTION: (f"{_LAYERS}self_attn.o_proj",),
            _ATTENTION_NORM: (f"{_LAYERS}input_layernorm",),
            _FIRST: (f"{_LAYERS}mlp.gate_proj", f"{_LAYERS}mlp.up_proj"),
            _SECOND: (f"{_LAYERS}mlp.down_proj",),
            _NORM: (f"{_LAYERS}post_attention_layernorm",),
            "encoder.final_norm": ("norm",),
        },
        {LAYER + "attention.self": f"{_LAYERS}self_attn.attention_dropout"},
        architectures.eurobert,
        settings={
            "layer_norm_eps": "rms_norm_eps",
            "attention_probs_dropout_prob": "attention_dropout",
        },
        defaults={
            "vocab_size": 128256,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": None,
            "head_dim": None,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 128001,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        lacks=("type_vocab_size", "hidden_dropout_prob", "classifier_dropout"),
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
        architectures.modernbert,
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
# fastbert's own model types, which transformers does not have.
OWN: dict[str, Family] = {
    # The configuration completes the architecture of this model type.
    ALIBI: Family("BertModel", "bert.", _WITHOUT_POSITIONS, _BERT_DROPOUTS),
}
# The families that fastbert reads natively.
NATIVE = {**FAMILIES, **OWN}
# The encoders that `fastbert.accelerate` serves.
ACCELERATED: dict[str, Family] = {
    **FAMILIES,
    "esm": Family(
        "EsmModel",
        "esm.",
        {
            **_same("embeddings.word_embeddings"),
            _QKV: _BERT[_QKV],
            **_same(_ATTENTION, _FIRST, _SECOND),
            _ATTENTION_NORM: (f"{LAYER}attention.LayerNorm",),
            _NORM: (f"{LAYER}LayerNorm",),
            "encoder.final_norm": ("encoder.emb_layer_norm_after",),
            **_POOLER,
        },
        {
            LAYER + "attention.self": LAYER + "attention.self.dropout",
            LAYER[:-1]: LAYER + "attention.output.dropout",
            LAYER + "output_dropout_p": LAYER + "output.dropout",
        },
        architectures.esm,
        defaults={
            "max_position_embeddings": 1026,
            "rope_theta": 10_000.0,
            "position_embedding_type": "absolute",
            "emb_layer_norm_before": None,
        },
        lacks=("hidden_act", "type_vocab_size", "classifier_dropout"),
        own_embedding=True,
    ),
    "t5": Family(
        "T5Stack",
        "encoder.",
        {
            "embeddings.word_embeddings": ("embed_tokens",),
            "encoder.relative_attention_bias": (
                "block.0.layer.0.SelfAttention.relative_attention_bias",
            ),
            _QKV: tuple(f"{_BLOCK}0.SelfAttention.{part}" for part in "qkv"),
            _ATTENTION: (f"{_BLOCK}0.SelfAttention.o",),
            _ATTENTION_NORM: (f"{_BLOCK}0.layer_norm",),
            _FIRST: (f"{_BLOCK}1.DenseReluDense.wi",),
            _SECOND: (f"{_BLOCK}1.DenseReluDense.wo",),
            _NORM: (f"{_BLOCK}1.layer_norm",),
            "encoder.final_norm": ("final_layer_norm",),
        },
        {
            "embeddings": "dropout",
            LAYER + "attention.self": f"{_BLOCK}0.SelfAttention.dropout",
            LAYER[:-1]: f"{_BLOCK}0.dropout",
            LAYER + "output": f"{_BLOCK}1.DenseReluDense.dropout",
            LAYER + "output_dropout_p": f"{_BLOCK}1.dropout",
            "encoder.final_dropout_p": "dropout",
        },
        architectures.t5,
        settings={
            "hidden_size": "d_model",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "intermediate_size": "d_ff",
            "hidden_act": "dense_act_fn",
            "attention_probs_dropout_prob": "dropout_rate",
            "layer_norm_eps": "layer_norm_epsilon",
        },
        gated={_FIRST: tuple(f"{_BLOCK}1.DenseReluDense.wi_{i}" for i in range(2))},
        lacks=(
            *("type_vocab_size", "max_position_embeddings", "initializer_range"),
            *("hidden_dropout_prob", "classifier_dropout"),
        ),
    ),
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
        architectures.marian,
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
_KNOWN = {**ACCELERATED, **OWN}
