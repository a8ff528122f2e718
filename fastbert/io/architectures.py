"""The differences of each model family from BERT, read from its ``config.json``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastbert.config import (
    MAX_LAYERS,
    Architecture,
    RelativePositions,
    check,
    integer_from,
    is_integer,
    is_number,
)

Content = dict[str, Any]


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


def _check_head_dim(content: Content) -> None:
    dim, heads = content.get("head_dim"), content["num_attention_heads"]
    fits = dim is None or dim * heads == content["hidden_size"]
    check("head_dim", dim, "None or hidden_size / num_attention_heads", fits)


def _own_head_dim(dim: Any, size: Any, heads: Any) -> Any:
    """Return the width of a head if it is not ``size / heads``, otherwise None."""
    return None if dim is None or dim * heads == size else dim


def after_padding(content: Content) -> Architecture:
    """Return the architecture of RoBERTa: positions are counted from the padding id plus 1."""
    padding = content["pad_token_id"]
    check("pad_token_id", padding, integer_from(0), is_integer(padding, 0))
    return Architecture(first_position=padding + 1)


def electra(content: Content) -> Architecture:
    """Return the architecture of ELECTRA: embeddings may be narrower than the hidden states."""
    narrow = content["embedding_size"] != content["hidden_size"]
    return Architecture(embedding_size=content["embedding_size"] if narrow else None, pooler=False)


def albert(content: Content) -> Architecture:
    """Return the architecture of ALBERT: narrow embeddings, and groups of layers that repeat."""
    return Architecture(
        embedding_size=content["embedding_size"],
        groups=content["num_hidden_groups"],
        group_size=content["inner_group_num"],
        output_dropout=0.0,
    )


def distilbert(content: Content) -> Architecture:
    """Return the architecture of DistilBERT: no token types, and one dropout less in a layer."""
    return Architecture(type_table=False, attention_output_dropout=0.0, pooler=False)


def mpnet(content: Content) -> Architecture:
    """Return the architecture of MPNet: no token types, and a bias by distance."""
    buckets = content["relative_attention_num_buckets"]
    if buckets != 32:  # transformers always computes with 32 buckets.
        raise ValueError(f"relative_attention_num_buckets: got {buckets}, allowed: 32")
    # The first position of MPNet is 2, independently of pad_token_id.
    return Architecture(type_table=False, first_position=2, distance_buckets=buckets)


def deberta_v2(content: Content) -> Architecture:
    """Return the architecture of DeBERTa v2 and v3: relative positions in the logits."""
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


def deberta(content: Content) -> Architecture:
    """Return the architecture of DeBERTa v1, whose projection has one head after another."""
    for name, only in (("talking_head", False), ("relative_attention", True)):
        value = content.get(name, False)
        check(name, value, str(only), value is only)
    # DeBERTa v1 lacks these choices of v2, and ignores their keys.
    absent = {"conv_kernel_size": None, "attention_head_size": None, "position_buckets": -1}
    choices = deberta_v2(content | absent | {"norm_rel_ebd": "none", "share_att_key": False})
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


def nomic(content: Content) -> Architecture:
    """Return the architecture of NomicBERT: rotary positions and a gated feed-forward."""
    _check_head_dim(content)
    base = _rotary(content, "", 1000.0)
    return Architecture(
        position_table=False,
        rotary_bases=(base,) * _layers(content),
        gated=True,
        attention_bias=False,
        feed_forward_bias=False,
        pooler=False,
    )


def gte(content: Content) -> Architecture:
    """Return the architecture of GTE: rotary positions and a feed-forward gated without bias."""
    _check_head_dim(content)
    return Architecture(
        position_table=False,
        type_table=content["type_vocab_size"] != 0,
        rotary_bases=(_rotary(content, "", 160_000.0),) * _layers(content),
        gated=True,
        gate_bias=False,
        inner_dropout=content["hidden_dropout_prob"],
        pooler=False,
    )


def jina(content: Content) -> Architecture:
    """Return the architecture of Jina Embeddings v3: rotary positions instead of a table."""
    _check_head_dim(content)
    return Architecture(
        position_table=False,
        rotary_bases=(_rotary(content, "", 20_000.0),) * _layers(content),
    )


def ernie(content: Content) -> Architecture:
    """Return the architecture of ERNIE, which has a table of task types beside the token types."""
    used, types = content["use_task_id"], content["task_type_vocab_size"]
    check("use_task_id", used, "True or False", isinstance(used, bool))
    return Architecture(task_types=types if used else 0)


def layoutlm(content: Content) -> Architecture:
    """Return the architecture of LayoutLM, whose embeddings contain the boxes of tokens."""
    return Architecture(box_positions=content["max_2d_position_embeddings"])


def esm(content: Content) -> Architecture:
    """Return the architecture of ESM-2: rotary positions, and norms before the blocks."""
    for name, allowed in (
        ("position_embedding_type", ("rotary",)),  # ESM-1b has a table of positions.
        ("emb_layer_norm_before", (False, None)),
    ):
        value = content[name]
        check(name, value, " or ".join(map(repr, allowed)), value in allowed)
    base = content["rope_theta"]
    check("rope_theta", base, "a number >= 1", is_number(base, 1.0))
    return Architecture(
        position_table=False,
        type_table=False,
        embedding_norm=False,
        rotary_bases=(float(base),) * _layers(content),
        pre_norm=True,
        first_norm=True,
        embedding_dropout=0.0,
    )


def roberta_pre_norm(content: Content) -> Architecture:
    """Return the architecture of RoBERTa with norms before the blocks, also in the first layer."""
    return replace(after_padding(content), pre_norm=True, first_norm=True)


def xlm_roberta_xl(content: Content) -> Architecture:
    """Return the architecture of XLM-R XL: norms before the blocks, none after the embeddings."""
    # The output of the feed-forward has no dropout.
    return replace(roberta_pre_norm(content), embedding_norm=False, output_dropout=0.0)


def megatron(content: Content) -> Architecture:
    """Return the architecture of Megatron BERT: norms before the blocks, none after embeddings."""
    return Architecture(pre_norm=True, first_norm=True, embedding_norm=False)


def modernbert(content: Content) -> Architecture:
    """Return the architecture of ModernBERT: rotary positions, windows, norms before blocks."""
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


def eurobert(content: Content) -> Architecture:
    """Return the architecture of EuroBERT: RMS norms, rotary positions and grouped queries."""
    base = _rotary(content, "", content.get("rope_theta") or 10_000.0)
    heads, groups = content["num_attention_heads"], content["num_key_value_heads"]
    return Architecture(
        position_table=False,
        type_table=False,
        embedding_norm=False,
        rotary_bases=(base,) * _layers(content),
        head_dim=_own_head_dim(content["head_dim"], content["hidden_size"], heads),
        key_value_heads=None if groups == heads else groups,
        pre_norm=True,
        rms_norm=True,
        first_norm=True,
        gated=True,
        attention_bias=content["attention_bias"],
        feed_forward_bias=content["mlp_bias"],
        embedding_dropout=0.0,
        attention_output_dropout=0.0,
        output_dropout=0.0,
        pooler=False,
    )


def t5(content: Content) -> Architecture:
    """Return the architecture of T5's encoder: RMS norms, unscaled logits, a bias by distance."""
    for name, allowed in (("is_decoder", False), ("relative_attention_max_distance", 128)):
        value = content[name]
        check(name, value, str(allowed), value == allowed)
    buckets, dropped = content["relative_attention_num_buckets"], content["dropout_rate"]
    return Architecture(
        position_table=False,
        type_table=False,
        embedding_norm=False,
        distance_buckets=buckets,
        head_dim=_own_head_dim(content["d_kv"], content["d_model"], content["num_heads"]),
        attention_scale=1.0,
        pre_norm=True,
        rms_norm=True,
        first_norm=True,
        gated=content["is_gated_act"],
        attention_bias=False,
        feed_forward_bias=False,
        pooler=False,
        embedding_dropout=dropped,
        attention_output_dropout=dropped,
        inner_dropout=dropped,
        output_dropout=dropped,
        final_dropout=dropped,
    )


def roformer(content: Content) -> Architecture:
    """Return the architecture of RoFormer, which rotates pairs of neighbours by a table."""
    narrow = content["embedding_size"] not in (None, content["hidden_size"])
    return Architecture(
        embedding_size=content["embedding_size"] if narrow else None,
        position_table=False,
        rotary_bases=(10_000.0,) * _layers(content),
        rotary_table=True,
        rotary_values=content["rotary_value"],
        pooler=False,
    )


def marian(content: Content) -> Architecture:
    """Return the architecture of Marian's encoder: no token types and no pooler."""
    skipped = content["encoder_layerdrop"]
    check("encoder_layerdrop", skipped, "0.0", skipped == 0)
    return Architecture(type_table=False, inner_dropout=content["activation_dropout"], pooler=False)
