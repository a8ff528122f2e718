"""Unfused PyTorch for every operation: the specification against which each kernel is checked.

Every function runs on any device and in any floating dtype up to float64. Autograd can
differentiate the functions twice, except the int8 functions, because they round. The code is
written to be read, not to be fast. If ``fastbert.ops`` has a function of the same name, both take
the same arguments, except that the functions here take no backends.
"""

from fastbert.reference.additive_scores import additive_scores
from fastbert.reference.attention import (
    attention,
    attention_qkvpacked,
    attention_varlen,
    attention_weights,
    choose,
    hide_unattended,
    softmax_weights,
    visible,
)
from fastbert.reference.cross_entropy import linear_cross_entropy
from fastbert.reference.decoder_step import decoder_step
from fastbert.reference.dropout import WORD, dropout, dropout_keep, philox
from fastbert.reference.embedding import embedding
from fastbert.reference.encoder import encoder
from fastbert.reference.feed_forward import activate, feed_forward, linear_gelu
from fastbert.reference.int8_linear import (
    Int8Weight,
    int8_linear,
    int8_rows,
    int8_weight,
    pack,
    unpack,
)
from fastbert.reference.layer_norm import layer_norm
from fastbert.reference.linear import linear
from fastbert.reference.relative_attention import (
    padded_segments,
    position_rows,
    relative_attention,
    relative_terms,
)
from fastbert.reference.rms_norm import rms_norm
from fastbert.reference.rotary import rotary
from fastbert.reference.splade import splade
from fastbert.reference.varlen import (
    Packed,
    existing_queries,
    longest,
    pad,
    pad_rows,
    sequence_positions,
    unpad,
    unpad_rows,
)

__all__ = [
    "WORD",
    "Int8Weight",
    "Packed",
    "activate",
    "additive_scores",
    "attention",
    "attention_qkvpacked",
    "attention_varlen",
    "attention_weights",
    "choose",
    "decoder_step",
    "dropout",
    "dropout_keep",
    "embedding",
    "encoder",
    "existing_queries",
    "feed_forward",
    "hide_unattended",
    "int8_linear",
    "int8_rows",
    "int8_weight",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_gelu",
    "longest",
    "pack",
    "pad",
    "pad_rows",
    "padded_segments",
    "philox",
    "position_rows",
    "relative_attention",
    "relative_terms",
    "rms_norm",
    "rotary",
    "sequence_positions",
    "softmax_weights",
    "splade",
    "unpack",
    "unpad",
    "unpad_rows",
    "visible",
]
