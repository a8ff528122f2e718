"""The result of the encoder–decoder, with the field names of transformers' Marian."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastbert.modules.outputs import ModelOutput

States = tuple[Tensor, ...]


@dataclass
class TransformerOutput(ModelOutput):
    """The output of `Transformer`.

    Ls is the length of the padded sources, Lt the length of the padded targets, and V the size of
    the target vocabulary. All tensors are 0 at padding.

    Attributes:
        loss: Mean cross entropy over the labelled tokens; None without labels.
        logits: Logits of shape ``(B, Lt, V)``; None if they were not computed.
        decoder_hidden_states: The embedded target and the output of every layer of the decoder,
            each of shape ``(B, Lt, H)``.
        decoder_attentions: Weights of the decoder's self-attention in each layer, of shape ``(B,
            heads, Lt, Lt)``.
        cross_attentions: Weights of the attention to the source in each layer, of shape ``(B,
            heads, Lt, Ls)``.
        encoder_last_hidden_state: Output of the encoder, of shape ``(B, Ls, H)``.
        encoder_hidden_states: The embedded source and the output of every layer of the encoder,
            each of shape ``(B, Ls, H)``.
        encoder_attentions: Weights of the encoder's self-attention in each layer, of shape ``(B,
            heads, Ls, Ls)``.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    decoder_hidden_states: States | None = None
    decoder_attentions: States | None = None
    cross_attentions: States | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: States | None = None
    encoder_attentions: States | None = None
