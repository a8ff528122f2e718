"""The operations: public functions that check their arguments and run on a chosen backend.

Each docstring states shapes, dtypes and errors. ``fastbert.reference`` has functions of the same
names that use PyTorch alone. ``fastbert.ops.backend`` chooses the backend of each call and gives
the reason for the choice.
"""

from fastbert.ops.additive_scores import additive_scores
from fastbert.ops.attention import (
    attention,
    attention_qkvpacked,
    attention_varlen,
    attention_weights,
)
from fastbert.ops.cross_entropy import linear_cross_entropy
from fastbert.ops.decoder_step import decoder_step
from fastbert.ops.embedding import embedding
from fastbert.ops.encoder import encoder
from fastbert.ops.feed_forward import feed_forward, linear_gelu
from fastbert.ops.int8_linear import int8_linear
from fastbert.ops.layer_norm import layer_norm
from fastbert.ops.linear import linear
from fastbert.ops.relative_attention import relative_attention
from fastbert.ops.rms_norm import rms_norm
from fastbert.ops.rotary import rotary
from fastbert.ops.splade import splade
from fastbert.ops.varlen import Packed, pad, unpad

__all__ = [
    "Packed",
    "additive_scores",
    "attention",
    "attention_qkvpacked",
    "attention_varlen",
    "attention_weights",
    "decoder_step",
    "embedding",
    "encoder",
    "feed_forward",
    "int8_linear",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_gelu",
    "pad",
    "relative_attention",
    "rms_norm",
    "rotary",
    "splade",
    "unpad",
]
