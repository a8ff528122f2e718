"""The BERT encoder (Devlin et al. 2019): embeddings, layers, pooler, without padding inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.config import BertConfig
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.dropout import draw_seeds
from fastbert.modules.embeddings import BertEmbeddings
from fastbert.modules.encoder import BertEncoder
from fastbert.modules.inputs import EncoderInput, enter
from fastbert.modules.linear import Linear
from fastbert.modules.outputs import BaseModelOutputWithPooling, as_asked
from fastbert.modules.pretrained import BertPreTrainedModel


class Encoded(NamedTuple):
    """What the encoder hands to the heads. ``rows`` (T, H) has no padding; the tuples are what the
    caller asked for, already in the caller's layout, or None."""

    rows: Tensor
    layout: BatchLayout
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor | None, ...] | None

    @property
    def last_hidden_state(self) -> Tensor:
        """The rows in the caller's layout: the last of the hidden states where there are any."""
        return self.hidden_states[-1] if self.hidden_states else self.layout.given(self.rows)


class BertPooler(nn.Module):
    """tanh(W h + b) of the first token, (B, H) → (B, H)."""

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size, backend)

    def forward(self, first: Tensor) -> Tensor:
        return torch.tanh(self.dense(first))


class BertModel(BertPreTrainedModel):
    """BERT without a head, with the state-dict names and outputs of transformers' ``BertModel``.

    ``backend`` asks for one implementation of every operation ("reference", "triton", "cuda",
    "cpu"); None lets each operation choose by device and dtype.
    """

    def __init__(
        self, config: BertConfig, add_pooling_layer: bool = True, *, backend: str | None = None
    ) -> None:
        super().__init__(config, backend)
        self.embeddings = BertEmbeddings(config, backend)
        self.encoder = BertEncoder(config, backend)
        pooling = add_pooling_layer and config.architecture.pooler
        self.pooler = BertPooler(config, backend) if pooling else None
        self.initialise(self)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        return_dict: bool | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPooling | tuple[Any, ...]:
        """Encodes a batch. The keywords of ``options`` are those of ``encode``; so are shapes and
        errors.

        Returns ``last_hidden_state`` (B, L, H), exactly 0 at padding, ``pooler_output`` (B, H),
        ``hidden_states`` and ``attentions``, or their tuple for ``return_dict=False``. Packed input
        gives ``last_hidden_state`` (T, H).
        """
        encoded = self.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **options
        )
        output = BaseModelOutputWithPooling(
            encoded.last_hidden_state,
            None if self.pooler is None else self.pool(encoded),
            encoded.hidden_states,
            encoded.attentions,
        )
        return as_asked(output, self.flag("return_dict", return_dict, True))

    def encode(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        output_attentions: bool | Sequence[int] | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Encoded:
        """``forward`` without the padded result: what the heads build on.

        Padded input: input_ids int (B, L) or inputs_embeds (B, L, H); attention_mask (B, L), 1 or
        True for tokens that exist, or, saying for each query which keys it sees, (B, L, L) or (B,
        heads or 1, L, L), bool or additive (0 = attend, -1e4 or less = hidden). position_ids
        default to 0 … L-1 in the padded row. Packed input: cu_seqlens int32 (B+1,) and max_seqlen,
        with (T,) ids or (T, H) embeddings; a sequence never sees another. token_type_ids default to
        0.

        output_attentions: softmax weights before dropout, per layer (B, heads, L, L), 0 at padding;
        numbers of layers for those alone, None for the others. Where a gradient is wanted, the
        model computes what follows from the returned hidden states and weights, so they carry
        gradients; layers whose weights are asked for then run a slower path.
        Raises ValueError or TypeError naming the argument, what was got and what is allowed.
        """
        want_attentions = (
            output_attentions
            if isinstance(output_attentions, Sequence)
            else self.flag("output_attentions", output_attentions)
        )
        want_states = self.flag("output_hidden_states", output_hidden_states)
        tokens = enter(
            self.config,
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            cu_seqlens,
            max_seqlen,
        )
        return self.encode_rows(tokens, want_attentions, want_states)

    def encode_rows(
        self,
        tokens: EncoderInput,
        output_attentions: bool | Sequence[int] = False,
        output_hidden_states: bool = False,
    ) -> Encoded:
        """``encode`` of tokens that ``fastbert.modules.inputs.enter`` has checked and laid out."""
        seeds = draw_seeds(self.config, self.training, tokens.positions.device)
        embedded = self.embeddings(tokens, seeds.embeddings)
        rows, states, attentions = self.encoder(
            embedded, tokens.layout, output_attentions, output_hidden_states, seeds.layers
        )
        return Encoded(
            rows,
            tokens.layout,
            tuple(states) if output_hidden_states else None,
            tuple(attentions) if attentions else None,
        )

    def pool(self, encoded: Encoded) -> Tensor:
        """(B, H): the pooler's view of each sequence's first token; see ``BatchLayout.first``."""
        if self.pooler is None:
            raise ValueError(
                "pooler: got None (add_pooling_layer=False), allowed: a model with one"
            )
        return self.pooler(encoded.layout.first(encoded.rows))
