"""The input of the decoder: the shift of labels, and the removal of padding from targets."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.config import BertConfig
from fastbert.modules.heads import IGNORED
from fastbert.modules.inputs import EncoderInput, check_range, enter
from fastbert.ops.arguments import require_shape
from fastbert.transformer_config import TransformerConfig


def shifted(labels: Tensor, config: TransformerConfig) -> Tensor:
    """Return the inputs of the decoder that predict `labels`.

    Args:
        labels: Labels of shape ``(B, L)``; -100 at tokens without a label.
        config: Configuration of the model.

    Returns:
        The labels moved right by one position, of shape ``(B, L)``. The first input is
        ``decoder_start_token_id``, and -100 becomes ``pad_token_id``.
    """
    inputs = torch.empty_like(labels)
    inputs[:, 1:] = labels[:, :-1]
    inputs[:, :1] = config.decoder_start_token_id
    return inputs.masked_fill_(inputs == IGNORED, config.pad_token_id)


def enter_target(
    config: TransformerConfig,
    layers: BertConfig,
    decoder_input_ids: Tensor | None,
    decoder_attention_mask: Tensor | None,
    labels: Tensor | None,
) -> EncoderInput:
    """Check the decoder's arguments of ``Transformer.forward``, and convert the tokens to rows.

    Args:
        config: Configuration of the model.
        layers: The result of ``config.decoder()``.
        decoder_input_ids: As in ``Transformer.forward``.
        decoder_attention_mask: As in ``Transformer.forward``. With None and `labels`, the positions
            after the last label of a sequence are padding.
        labels: As in ``Transformer.forward``.

    Returns:
        The tokens as rows.

    Raises:
        ValueError: If a shape or a value is not allowed. The message names the argument, its value
            and what is allowed.
        TypeError: If a dtype is not allowed.
    """
    if labels is not None:
        check_range("labels", labels, layers.vocab_size, ignored=IGNORED)
        if labels.dim() != 2:
            raise ValueError(f"labels: got shape {tuple(labels.shape)}, allowed: (B, L)")
        if decoder_input_ids is None:
            decoder_input_ids = shifted(labels, config)
        else:
            require_shape("labels", labels, decoder_input_ids.shape)
        if decoder_attention_mask is None:
            # A position is a token if it or a later position has a label.
            counted = (labels != IGNORED).flip(1).cumsum(1)
            decoder_attention_mask = (counted > 0).flip(1)
    if decoder_input_ids is None:
        raise ValueError("decoder_input_ids, labels: got neither, allowed: one of them or both")
    check_mask("decoder_attention_mask", decoder_attention_mask)
    try:
        return enter(layers, decoder_input_ids, decoder_attention_mask)
    except (TypeError, ValueError) as error:
        # The message begins with the name of an argument of the encoder.
        raise type(error)(f"decoder_{error}") from error


def check_mask(name: str, mask: Tensor | None) -> None:
    """Raise ValueError unless a mask is None, or has one or two dimensions.

    Masks of queries and keys are not allowed, because padding is removed from both sides.
    """
    if mask is not None and mask.dim() > 2:
        raise ValueError(f"{name}: got shape {tuple(mask.shape)}, allowed: (B, L)")
