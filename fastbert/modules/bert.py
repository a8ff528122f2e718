"""The BERT encoder (Devlin et al. 2019): embeddings, layers and pooler, without padding inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.config import BertConfig
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.chosen_rows import ChosenRows, Reads
from fastbert.modules.dropout import draw_seeds
from fastbert.modules.embeddings import BertEmbeddings
from fastbert.modules.encoder import BertEncoder, chosen_layers
from fastbert.modules.inputs import EncoderInput, enter
from fastbert.modules.linear import Linear
from fastbert.modules.outputs import BaseModelOutputWithPooling, as_asked
from fastbert.modules.prepared_call import PreparedCall
from fastbert.modules.pretrained import BertPreTrainedModel


class Encoded(NamedTuple):
    """The result of the encoder, from which the heads compute their outputs.

    Attributes:
        rows: Hidden states after the last layer, of shape ``(T, H)``, without padding.
        layout: Division of the rows into sequences.
        hidden_states: A tuple of the hidden states in the caller's layout, with None for each state
            that the caller did not choose; None if the caller chose no states.
        attentions: A tuple of attention weights in the caller's layout, with None for each layer
            that the caller did not choose; None if the caller chose no layers.
        pooled: The pooled first tokens ``(B, H)`` if one C++ call computed them with the rows;
            otherwise None.
        chosen: The rows that were computed, if the last layer computed only the N rows that the
            head reads. `rows` then has the shape ``(N, H)``. None if all rows were computed.
    """

    rows: Tensor
    layout: BatchLayout
    hidden_states: tuple[Tensor | None, ...] | None
    attentions: tuple[Tensor | None, ...] | None
    pooled: Tensor | None = None
    chosen: ChosenRows | None = None

    @property
    def last_hidden_state(self) -> Tensor:
        """Hidden states after the last layer, in the caller's layout.

        If `hidden_states` contains the last hidden state, the result is the same tensor.
        """
        last = self.hidden_states[-1] if self.hidden_states else None
        return self.layout.given(self.rows) if last is None else last


class BertPooler(nn.Module):
    """The pooler ``tanh(W h + b)`` of the first token, ``(B, H) → (B, H)``."""

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        """Create the projection."""
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size, backend)

    def forward(self, first: Tensor) -> Tensor:
        """Compute the pooled vectors ``(B, H)`` of the first tokens ``(B, H)``."""
        return torch.tanh(self.dense(first))


class BertModel(BertPreTrainedModel):
    """BERT without a head, with the state-dict names and outputs of transformers' ``BertModel``.

    Args:
        config: Configuration of the model.
        add_pooling_layer: Whether the model has a pooler. The argument has no effect for an
            architecture without a pooler.
        backend: Requested backend, ``"reference"``, ``"triton"``, ``"cuda"`` or ``"cpu"``. An
            operation without a full implementation by this backend chooses by device and dtype.
            None lets every operation choose.

    Raises:
        ValueError: If `backend` is unknown.

    Examples:
        >>> import torch
        >>> from fastbert import BertConfig, BertModel
        >>> model = BertModel(BertConfig.preset("tiny", vocab_size=8192)).eval()
        >>> ids = torch.tensor([[2, 7, 8, 3], [2, 9, 3, 0]])
        >>> with torch.no_grad():
        ...     output = model(ids, attention_mask=ids != 0)
        >>> output.last_hidden_state.shape, output.pooler_output.shape
        (torch.Size([2, 4, 128]), torch.Size([2, 128]))
        >>> output.last_hidden_state[1, 3].abs().max().item()  # The last token is padding.
        0.0
        >>> packed = torch.tensor([2, 7, 8, 3, 2, 9, 3])
        >>> cu_seqlens = torch.tensor([0, 4, 7], dtype=torch.int32)  # The lengths are 4 and 3.
        >>> model(packed, cu_seqlens=cu_seqlens).last_hidden_state.shape
        torch.Size([7, 128])
    """

    def __init__(
        self, config: BertConfig, add_pooling_layer: bool = True, *, backend: str | None = None
    ) -> None:
        """Create the modules and initialise their parameters."""
        super().__init__(config, backend)
        self.embeddings = BertEmbeddings(config, backend)
        self.encoder = BertEncoder(config, backend)
        pooling = add_pooling_layer and config.architecture.pooler
        self.pooler = BertPooler(config, backend) if pooling else None
        self._prepared = PreparedCall()
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
        """Compute the hidden states and the pooled output of a batch.

        The input is either padded or packed. Packed input has no batch dimension, and `cu_seqlens`
        divides it into sequences. A packed sequence never attends to another sequence.

        Args:
            input_ids: Token ids, int64 or int32 of shape ``(B, L)``; ``(T,)`` if packed.
            attention_mask: Mask of shape ``(B, L)``, 1 or True at tokens and 0 at padding. A mask
                of shape ``(B, L, L)`` or ``(B, heads or 1, L, L)`` defines the keys to which each
                query attends. Such a mask is bool, integers 0 and 1, or additive. An additive mask
                is 0 where a query attends to a key, and -1e4 or less where the key is hidden.
                Packed input must have no mask.
            token_type_ids: Token types of the shape of `input_ids`, or ``(1, L)``; 0 by default.
            position_ids: Positions of the shape of `input_ids`, or ``(1, L)``. The default is the
                index in the padded row, ``0`` to ``L - 1``, or the index in the packed sequence.
                In RoBERTa, positions start at ``config.architecture.first_position`` and do not
                count padding.
            inputs_embeds: Floating word embeddings of shape ``(B, L, E)`` instead of `input_ids`;
                ``(T, E)`` if packed. E is the width of the embedding tables.
            return_dict: Whether the result is an output object; False returns a tuple instead. None
                takes the value of the configuration, whose default is True.
            **options: Keyword arguments of `encode`: `output_attentions`, `output_hidden_states`,
                `cu_seqlens`, `max_seqlen`, `task_type_ids` and `bbox`.

        Returns:
            ``last_hidden_state`` of shape ``(B, L, H)``, exactly 0 at padding; ``(T, H)`` if
            packed. ``pooler_output`` has shape ``(B, H)``, or is None without a pooler.
            ``hidden_states`` and ``attentions`` are None unless the caller asks for them.

        Raises:
            ValueError: If a shape or a value is not allowed. The message names the argument, its
                value and what is allowed. Values in a tensor are checked on the CPU only, because a
                check on a GPU would make the CPU wait.
            TypeError: If a dtype is not allowed.
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
        output_hidden_states: bool | Sequence[int] | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        task_type_ids: Tensor | None = None,
        bbox: Tensor | None = None,
        reads: Reads | None = None,
    ) -> Encoded:
        """Encode a batch for a head, without the padded result of `forward`.

        If autograd records the call, the model computes its later results from the returned hidden
        states and attention weights, so that gradients flow through these tensors. Layers that
        return their attention weights then run on a slower path.

        Args:
            input_ids: As in `forward`.
            attention_mask: As in `forward`.
            token_type_ids: As in `forward`.
            position_ids: As in `forward`.
            inputs_embeds: As in `forward`.
            output_attentions: Whether the softmax weights before dropout are returned. A sequence
                of layer numbers returns the weights of these layers and None for the others; a
                negative number counts from the last layer. None takes the value of the
                configuration.
            output_hidden_states: Whether the hidden states are returned. A sequence of numbers
                returns these states and None for the others; 0 is the embedding output, N is the
                output of layer N, and a negative number counts from the last state. The choice does
                not change the code path of the layers. None takes the value of the configuration.
            cu_seqlens: Cumulative lengths of the packed sequences from 0, int32 of shape
                ``(B + 1,)``; None if the input is padded.
            max_seqlen: Length of the longest packed sequence, or an upper bound. With None, the
                length is computed from `cu_seqlens`; on a GPU, the CPU waits for this length.
            task_type_ids: Task types of the shape of `input_ids`, or ``(1, L)``; 0 by default. Only
                ERNIE has task types.
            bbox: Box of each token on its page, int64 or int32 of shape ``(B, L, 4)``; the shape is
                ``(T, 4)`` if packed. A box has its left, upper, right and lower side, each at least
                0 and less than ``config.architecture.box_positions``; 0 by default. Only LayoutLM
                has boxes.
            reads: Function that takes the layout and returns a mask of the rows that the head reads
                besides the first tokens, bool of shape ``(T,)``. The function returns None if the
                head reads only the first tokens. In training on the CPU, the last layer may then
                compute only the rows that the head reads; see ``BertEncoder.choose``. All rows are
                computed if the caller asks for hidden states or attention weights. If `reads` is
                None, the head reads all rows.

        Returns:
            The rows without padding. Attention weights have shape ``(B, heads, L, L)`` for each
            layer and are 0 at padding.

        Raises:
            ValueError: As in `forward`.
            TypeError: As in `forward`.
        """
        want_attentions = (
            output_attentions
            if isinstance(output_attentions, Sequence)
            else self.flag("output_attentions", output_attentions)
        )
        want_states = (
            output_hidden_states
            if isinstance(output_hidden_states, Sequence)
            else self.flag("output_hidden_states", output_hidden_states)
        )
        last = len(self.encoder.order)
        states = chosen_layers("output_hidden_states", want_states, last + 1)
        if (
            not want_attentions
            and states <= {last}
            and position_ids is None
            and inputs_embeds is None
            and task_type_ids is None
            and bbox is None
            and (cu_seqlens is not None or max_seqlen is None)
        ):
            result = self.encode_at_once(
                input_ids, attention_mask, token_type_ids, cu_seqlens, max_seqlen
            )
            if result is not None:
                if states:
                    kept = (*[None] * last, result.last_hidden_state)
                    result = result._replace(hidden_states=kept)
                return result
        tokens = enter(
            self.config,
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            cu_seqlens,
            max_seqlen,
            task_type_ids=task_type_ids,
            bbox=bbox,
        )
        return self.encode_rows(tokens, want_attentions, want_states, reads)

    def encode_at_once(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        cu_seqlens: Any = None,
        max_seqlen: int | None = None,
    ) -> Encoded | None:
        """Compute the embeddings, layers and pooler of a batch in one C++ call.

        Args:
            input_ids: As in `forward`, of shape ``(B, L)``; ``(T,)`` if packed.
            attention_mask: As in `forward`, of shape ``(B, L)``.
            token_type_ids: As in `forward`, of the shape of `input_ids`.
            cu_seqlens: As in `encode`.
            max_seqlen: As in `encode`.

        Returns:
            The rows without padding, or None if the modules must be called one by one. For example,
            the result is None on a device other than the CPU, with gradients enabled, under
            autocast, in training and with hooks. The result is also None if an argument is not
            allowed, so that the modules raise the error.
        """
        result = self._prepared.run(
            self, input_ids, attention_mask, token_type_ids, cu_seqlens, max_seqlen
        )
        if result is None:
            return None
        return Encoded(result.rows, result.layout, None, None, result.pooled)

    def encode_rows(
        self,
        tokens: EncoderInput,
        output_attentions: bool | Sequence[int] = False,
        output_hidden_states: bool | Sequence[int] = False,
        reads: Reads | None = None,
    ) -> Encoded:
        """Encode tokens that were checked and converted to rows by ``modules.inputs.enter``.

        Args:
            tokens: The tokens without padding.
            output_attentions: As in `encode`.
            output_hidden_states: As in `encode`.
            reads: As in `encode`.

        Returns:
            The rows without padding, as in `encode`.

        Raises:
            ValueError: If `output_attentions` names a layer that does not exist, or if
                `output_hidden_states` names a state that does not exist.
            TypeError: If one of the two arguments is neither a bool nor a sequence.
        """
        seeds = draw_seeds(self.config, self.training, tokens.positions.device)
        table = self.encoder.rotary_table
        if table is not None:
            turns = {table.base: table(tokens.positions)}
            tokens = tokens._replace(layout=dataclasses.replace(tokens.layout, rotations=turns))
        embedded = tokens.embedded
        if embedded is None:
            embedded = self.embeddings(tokens, seeds.embeddings)
        chosen = None
        if reads is not None and not output_attentions and not output_hidden_states:
            chosen = self.encoder.choose(embedded, tokens.layout, reads)
        rows, states, attentions = self.encoder(
            embedded, tokens.layout, output_attentions, output_hidden_states, seeds.layers, chosen
        )
        return Encoded(
            rows,
            tokens.layout,
            tuple(states) if states else None,
            tuple(attentions) if attentions else None,
            chosen=chosen,
        )

    def pool(self, encoded: Encoded) -> Tensor:
        """Apply the pooler to the first token of each sequence.

        Args:
            encoded: The result of `encode`.

        Returns:
            Tensor of shape ``(B, H)``. ``BatchLayout.first`` defines the first token.

        Raises:
            ValueError: If the model has no pooler.
        """
        if self.pooler is None:
            raise ValueError("pooler: got None, allowed: a model that has a pooler")
        if encoded.pooled is not None:
            return encoded.pooled
        if encoded.chosen is not None:
            return self.pooler(encoded.chosen.first(encoded.rows))
        return self.pooler(encoded.layout.first(encoded.rows))
