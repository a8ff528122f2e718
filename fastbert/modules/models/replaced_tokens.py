"""Pre-training of DeBERTa v3: the mask decoder, and replaced token detection.

He et al. 2021, section 3.2, has the mask decoder. Clark et al. 2020 (ELECTRA) has replaced token
detection, and He et al. 2023, section 3, has it for DeBERTa, with gradient-disentangled sharing of
embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert import ops
from fastbert.activations import ACTIVATIONS, of_config
from fastbert.config import BertConfig, check, is_number
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.bert import BertModel, Encoded
from fastbert.modules.heads import IGNORED, LMPredictionHead
from fastbert.modules.layer import BertLayer
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.linear import Linear
from fastbert.modules.models.task_model import label_rows
from fastbert.modules.operation import OperationModule
from fastbert.modules.relative_attention import RelativeSelfAttention

# How the discriminator uses the word embeddings of the generator.
SHARING = ("gdes", "es", "none")


class MaskDecoder(nn.Module):
    """The mask decoder: the last layer runs twice, on queries that know absolute positions.

    The first queries are the input of the last layer plus embeddings of absolute positions, and the
    second queries are the result of the first run. The keys and values are those of the last layer
    in both runs. The layer is that of the encoder, so the decoder adds only the positions.

    Args:
        config: Configuration of the model, which has relative positions.

    Raises:
        ValueError: If the architecture has no relative positions.
    """

    RUNS = 2

    def __init__(self, config: BertConfig) -> None:
        """Create the table of absolute positions."""
        super().__init__()
        relative = config.architecture.relative_positions
        check("relative_positions", relative, "relative positions", relative is not None)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        nn.init.normal_(self.position_embeddings.weight, std=config.initializer_range)

    def forward(self, encoder: nn.Module, hidden: Tensor, layout: BatchLayout) -> Tensor:
        """Decode rows.

        Args:
            encoder: The encoder whose last layer runs.
            hidden: Rows of shape ``(T, H)`` before the last layer.
            layout: Division of the rows into sequences.

        Returns:
            Rows of shape ``(T, H)``.

        Raises:
            TypeError: If the last layer has no relative attention of its own.
        """
        layer = encoder.running()[-1]
        layout = encoder.with_positions(layout)
        queries = hidden + self.position_embeddings(layout.positions(hidden))
        for _ in range(self.RUNS):
            queries = _run_on_queries(layer, hidden, queries, layout)
        return queries


def _run_on_queries(
    layer: nn.Module, hidden: Tensor, queries: Tensor, layout: BatchLayout
) -> Tensor:
    """Run a layer with the keys and values of `hidden`, and everything else of `queries`."""
    attention = layer.attention.self if isinstance(layer, BertLayer) else layer
    if not isinstance(layer, BertLayer) or not isinstance(attention, RelativeSelfAttention):
        kind = type(attention).__name__
        raise TypeError(f"layer: got {kind}, allowed: a layer with relative attention")
    attended, residual, _ = attention(hidden, layout, queries=queries)
    return layer.output(layer.attention.output(attended, residual), layer.intermediate)


class DebertaForMaskedLM(nn.Module):
    """An encoder with relative positions, the mask decoder, and the masked-LM head (DeBERTa).

    The weight of the head is that of the word embeddings.

    Args:
        config: Configuration of the model.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
    """

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        """Create the modules."""
        super().__init__()
        self.encoder = BertModel(config, add_pooling_layer=False, backend=backend)
        self.decoder = MaskDecoder(config)
        self.head = LMPredictionHead(config, backend)
        self.encoder.initialise(self.head)
        self.head.decoder.weight = self.encoder.embeddings.word_embeddings.weight
        self.head.decoder.bias = self.head.bias

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Compute the loss and the logits of the labelled tokens.

        Args:
            input_ids: Token ids with masks, int64 or int32 of shape ``(B, L)``; ``(T,)`` if packed.
            labels: The original ids at the tokens to predict and -100 elsewhere, of the shape of
                `input_ids`. None predicts every token that is not padding.
            attention_mask: Mask of shape ``(B, L)``, 1 at tokens and 0 at padding.
            cu_seqlens: As in ``BertModel.encode``.
            max_seqlen: As in ``BertModel.encode``.

        Returns:
            The mean loss over the N labelled tokens, which is 0 if there are none, or None if
            `labels` is None; and their logits ``(N, V)`` in the order of the rows.
        """
        last = len(self.encoder.encoder.order)
        encoded = self.encoder.encode(
            input_ids, attention_mask, output_hidden_states=[last - 1], cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )  # fmt: skip
        assert encoded.hidden_states is not None
        before_last = encoded.hidden_states[last - 1]
        assert before_last is not None
        layout = encoded.layout
        rows = self.decoder(self.encoder.encoder, layout.rows(before_last), layout)
        if labels is None:
            return None, self.head(rows, None, True)[1]
        of_rows = label_rows(labels, layout)
        labelled = (of_rows != IGNORED).nonzero().flatten()
        loss, logits = self.head(rows[labelled], of_rows[labelled], True)
        return loss, logits


class ReplacedTokenHead(OperationModule):
    """The logit of each token that it was replaced: ``w · f(W LN(h_0 + h) + b) + c``.

    ``h_0`` is the first token of the sequence.

    Args:
        config: Configuration of the model.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
    """

    operation = "linear_gelu"

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        """Create the projections and the layer norm."""
        super().__init__(backend)
        size = config.hidden_size
        self.LayerNorm = LayerNorm(size, config.layer_norm_eps, backend=backend)
        self.dense = nn.Linear(size, size)
        self.classifier = Linear(size, 1, backend)
        self.activation = of_config(gated=False)[config.hidden_act].name

    def forward(self, encoded: Encoded) -> Tensor:
        """Compute the logits of all rows.

        Args:
            encoded: The result of ``BertModel.encode``.

        Returns:
            Logits of shape ``(T,)``.
        """
        rows, layout = encoded.rows, encoded.layout
        sequence = layout.sequences(rows)
        first = layout.first(rows).index_select(0, sequence)
        hidden = ops.linear_gelu(
            self.LayerNorm(rows, residual=first), self.dense.weight, self.dense.bias,
            approximate=ACTIVATIONS[self.activation].approximate, backend=self.backend,
        )  # fmt: skip
        return self.classifier(hidden).squeeze(-1)


@dataclass
class ReplacedTokenOutput:
    """The result of `DebertaForReplacedTokenDetection`.

    Attributes:
        loss: The generator's loss plus `weight` times the discriminator's loss, a scalar.
        generator_loss: Mean cross entropy over the masked tokens, a scalar.
        discriminator_loss: Mean binary cross entropy over all tokens that are not padding.
        ids: The ids that the discriminator has read, of the shape of the input.
        replaced: Whether a token differs from the original token, bool of the same shape.
        logits: Logits of the rows, of shape ``(T,)``; positive for tokens that look replaced.
    """

    loss: Tensor
    generator_loss: Tensor
    discriminator_loss: Tensor
    ids: Tensor
    replaced: Tensor
    logits: Tensor


class DebertaForReplacedTokenDetection(nn.Module):
    """Pre-training of a discriminator that finds the tokens which a generator has replaced.

    The generator predicts masked tokens. Tokens that are drawn from its predictions replace the
    masks, and the discriminator predicts for every token whether it was replaced.

    Args:
        generator: Configuration of the generator.
        discriminator: Configuration of the discriminator.
        sharing: How the discriminator uses the word embeddings of the generator. With ``"gdes"``,
            its embeddings are those of the generator plus a table of its own that begins with
            zeros, and its loss has no gradient for the generator's table. With ``"es"``, both
            losses train one table. With ``"none"``, each model has its own table.
        weight: Factor of the discriminator's loss.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.

    Raises:
        ValueError: If a value is not allowed, or if the vocabularies or, with shared embeddings,
            the widths differ. The message names the argument.
    """

    def __init__(
        self,
        generator: BertConfig,
        discriminator: BertConfig,
        *,
        sharing: str = "gdes",
        weight: float = 50.0,
        backend: str | None = None,
    ) -> None:
        """Create both models."""
        super().__init__()
        check("sharing", sharing, ", ".join(SHARING), sharing in SHARING)
        check("weight", weight, "a number >= 0", is_number(weight, 0.0))
        sizes = ("vocab_size",) if sharing == "none" else ("vocab_size", "hidden_size")
        for name in sizes:
            got, allowed = getattr(discriminator, name), getattr(generator, name)
            text = f"{allowed}, as the generator"
            check(f"discriminator.{name}", got, text, got == allowed)
        self.sharing, self.weight = sharing, weight
        self.generator = DebertaForMaskedLM(generator, backend)
        self.discriminator = BertModel(discriminator, add_pooling_layer=False, backend=backend)
        self.head = ReplacedTokenHead(discriminator, backend)
        self.discriminator.initialise(self.head)
        words = self.discriminator.embeddings.word_embeddings
        if sharing == "gdes":
            nn.init.zeros_(words.weight)
        elif sharing == "es":
            words.weight = self._shared_table()

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        *,
        temperature: float = 1.0,
        random: torch.Generator | None = None,
    ) -> ReplacedTokenOutput:
        """Compute both losses.

        Args:
            input_ids: Token ids with masks, int64 or int32 of shape ``(B, L)``.
            labels: The original ids at the masked tokens and -100 elsewhere, int64 ``(B, L)``.
            attention_mask: Mask of shape ``(B, L)``, 1 at tokens and 0 at padding.
            temperature: Divisor of the generator's logits before a token is drawn.
            random: Generator of random numbers of the drawn tokens; None takes torch's.

        Returns:
            The losses, the ids that the discriminator has read, and its logits.
        """
        generator_loss, logits = self.generator(input_ids, labels, attention_mask)
        assert generator_loss is not None
        masked = labels != IGNORED
        if attention_mask is not None:
            masked = masked & attention_mask.bool()
        ids = input_ids.long()
        if logits.shape[0]:
            chances = torch.softmax(logits.detach().float() / temperature, -1)
            drawn = torch.multinomial(chances, 1, generator=random).squeeze(1)
            ids = ids.masked_scatter(masked, drawn)
        replaced = masked & (ids != labels)
        encoded = self.discriminator.encode(
            attention_mask=attention_mask, inputs_embeds=self._embeds(ids)
        )
        found = self.head(encoded)
        truth = encoded.layout.rows(replaced).to(torch.float32)
        loss = F.binary_cross_entropy_with_logits(found.float(), truth)
        total = generator_loss + self.weight * loss
        return ReplacedTokenOutput(total, generator_loss, loss, ids, replaced, found)

    def discriminator_state(self) -> dict[str, Tensor]:
        """Return the state dict of a ``BertModel`` that computes what the discriminator computes.

        With ``"gdes"``, its word embeddings are the sum of both tables.
        """
        state = self.discriminator.state_dict()
        if self.sharing == "gdes":
            name = "embeddings.word_embeddings.weight"
            state[name] = state[name] + self._shared_table().detach()
        return state

    def _shared_table(self) -> nn.Parameter:
        return self.generator.encoder.embeddings.word_embeddings.weight

    def _embeds(self, ids: Tensor) -> Tensor:
        own = self.discriminator.embeddings.word_embeddings(ids)
        if self.sharing != "gdes":
            return own
        return own + F.embedding(ids, self._shared_table().detach())
