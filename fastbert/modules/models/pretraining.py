"""The models of pre-training: masked LM, next sentence prediction, and both together."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastbert.config import BertConfig
from fastbert.modules.bert import Encoded
from fastbert.modules.chosen_rows import Reads, first_tokens
from fastbert.modules.heads import (
    IGNORED,
    LMPredictionHead,
    OnlyMLMHead,
    OnlyNSPHead,
    PreTrainingHeads,
    cross_entropy,
)
from fastbert.modules.models.task_model import Result, TaskModel, label_rows
from fastbert.modules.outputs import (
    BertForPreTrainingOutput,
    MaskedLMOutput,
    NextSentencePredictorOutput,
)


class _MaskedLM(TaskModel):
    """The base of `BertForPreTraining` and `BertForMaskedLM`, which have a masked-LM head."""

    cls: OnlyMLMHead

    def tied(self) -> dict[str, str]:
        """Return the tied parameters of the decoder; see ``BertPreTrainedModel.tied``."""
        if not self.config.tie_word_embeddings:
            return {}
        return {
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        }

    def get_output_embeddings(self) -> nn.Linear:
        """Return the projection to the vocabulary."""
        return self.cls.predictions.decoder

    def _wants_logits(self, labels: Tensor | None, output_logits: bool | None) -> bool:
        return (labels is None or not self.training) if output_logits is None else output_logits

    def _reads(self, labels: Tensor | None, output_logits: bool | None) -> Reads | None:
        """Return a function that marks the labelled tokens, or None if the head reads all rows."""
        if labels is None or self._wants_logits(labels, output_logits):
            return None
        return lambda layout: label_rows(labels, layout) != IGNORED

    def _predict(
        self, encoded: Encoded, labels: Tensor | None, output_logits: bool | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute the loss over labelled tokens and the logits in the caller's layout.

        The loss is None without labels. The logits are None if `output_logits` is False, or if it
        is None and the loss is computed in training mode.
        """
        output_logits = self._wants_logits(labels, output_logits)
        head: LMPredictionHead = self.cls.predictions
        rows = None if labels is None else label_rows(labels, encoded.layout)
        if rows is not None and encoded.chosen is not None:
            rows = rows.index_select(0, encoded.chosen.indices)
        loss, logits = head(encoded.rows, rows, output_logits)
        return loss, None if logits is None else encoded.layout.given(logits)


class BertForPreTraining(_MaskedLM):
    """Masked LM and next sentence prediction (Devlin et al. 2019, section 3.1).

    Args:
        config: The configuration, whose ``model_type`` is ``"bert"``.
        backend: As in `BertModel`.

    Raises:
        ValueError: If ``config.model_type`` is not ``"bert"``, or if `backend` is unknown.

    Examples:
        >>> import torch
        >>> from fastbert import BertConfig, BertForPreTraining
        >>> model = BertForPreTraining(BertConfig.preset("tiny", vocab_size=8192)).eval()
        >>> ids = torch.tensor([[2, 7, 3, 8, 3]])
        >>> labels = torch.tensor([[-100, 9, -100, -100, -100]])
        >>> output = model(ids, labels=labels, next_sentence_label=torch.tensor([0]))
        >>> output.prediction_logits.shape, output.seq_relationship_logits.shape
        (torch.Size([1, 5, 8192]), torch.Size([1, 2]))
        >>> bool(output.loss == output.mlm_loss + output.nsp_loss)
        True
    """

    def __init__(self, config: BertConfig, *, backend: str | None = None) -> None:
        """Create the modules and initialise their parameters."""
        super().__init__(config, backend=backend)
        self.cls = PreTrainingHeads(config, backend)
        self.initialise(self.cls)
        self.tie_weights()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        *,
        output_logits: bool | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> Result:
        """Compute the logits of both tasks, and the loss of each task whose labels are not None.

        Args:
            input_ids: As in `BertModel.forward`.
            attention_mask: As in `BertModel.forward`.
            token_type_ids: As in `BertModel.forward`.
            position_ids: As in `BertModel.forward`.
            inputs_embeds: As in `BertModel.forward`.
            labels: Token ids to predict, int64 or int32 of shape ``(B, L)``, in ``[0, V)``; -100 at
                tokens that do not count. The shape is ``(T,)`` for packed input.
            next_sentence_label: Integers of shape ``(B,)``; 0 if the second sentence follows the
                first, and 1 otherwise.
            output_logits: Whether ``prediction_logits`` are computed. With None, the logits are
                computed if `labels` is None or the model is in eval mode.
            return_dict: As in `BertModel.forward`.
            **options: Keyword arguments of `BertModel.encode`.

        Returns:
            ``prediction_logits`` of shape ``(B, L, V)`` and ``seq_relationship_logits`` of shape
            ``(B, 2)``. ``loss`` is ``mlm_loss + nsp_loss``, or None if `labels` or
            `next_sentence_label` is None. ``mlm_loss`` is 0 if no token has a label.

        Raises:
            ValueError: As in `BertModel.forward`, or if a label is out of range or the labels have
                the wrong shape.
            TypeError: As in `BertModel.forward`, or if labels are not integers.
        """
        encoded = self.bert.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            reads=self._reads(labels, output_logits),
            **options,
        )
        mlm_loss, logits = self._predict(encoded, labels, output_logits)
        related = self.cls.seq_relationship(self.bert.pool(encoded))
        nsp_loss = None
        if next_sentence_label is not None:
            nsp_loss = cross_entropy("next_sentence_label", related, next_sentence_label.view(-1))
        loss = None if mlm_loss is None or nsp_loss is None else mlm_loss + nsp_loss
        output = BertForPreTrainingOutput(
            loss, logits, related, encoded.hidden_states, encoded.attentions, mlm_loss, nsp_loss
        )
        return self._asked(output, return_dict)


class BertForMaskedLM(_MaskedLM):
    """Masked LM without next sentence prediction and without a pooler.

    Args:
        config: The configuration, whose ``model_type`` is ``"bert"``.
        backend: As in `BertModel`.

    Raises:
        ValueError: If ``config.model_type`` is not ``"bert"``, or if `backend` is unknown.

    Examples:
        >>> import torch
        >>> from fastbert import BertConfig, BertForMaskedLM
        >>> model = BertForMaskedLM(BertConfig.preset("tiny", vocab_size=8192))
        >>> ids = torch.tensor([[2, 7, 8, 3]])
        >>> labels = torch.tensor([[-100, 9, -100, -100]])
        >>> output = model(ids, labels=labels)  # A training step computes the loss alone.
        >>> output.loss.shape, output.logits
        (torch.Size([]), None)
    """

    def __init__(self, config: BertConfig, *, backend: str | None = None) -> None:
        """Create the modules and initialise their parameters."""
        super().__init__(config, backend=backend, pooling=False)
        self.cls = OnlyMLMHead(config, backend)
        self.initialise(self.cls)
        self.tie_weights()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        output_logits: bool | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> Result:
        """Compute the logits and the masked-LM loss.

        Args:
            input_ids: As in `BertModel.forward`.
            attention_mask: As in `BertModel.forward`.
            token_type_ids: As in `BertModel.forward`.
            position_ids: As in `BertModel.forward`.
            inputs_embeds: As in `BertModel.forward`.
            labels: As in `BertForPreTraining.forward`.
            output_logits: Whether the logits are computed, as in `BertForPreTraining.forward`.
            return_dict: As in `BertModel.forward`.
            **options: Keyword arguments of `BertModel.encode`.

        Returns:
            ``logits`` of shape ``(B, L, V)``, or ``(T, V)`` for packed input. ``loss`` is the mean
            over labelled tokens, 0 if no token has a label, and None without labels.

        Raises:
            ValueError: As in `BertModel.forward`, or if a label is out of range or the labels have
                the wrong shape.
            TypeError: As in `BertModel.forward`, or if labels are not integers.
        """
        encoded = self.bert.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            reads=self._reads(labels, output_logits),
            **options,
        )
        loss, logits = self._predict(encoded, labels, output_logits)
        output = MaskedLMOutput(loss, logits, encoded.hidden_states, encoded.attentions)
        return self._asked(output, return_dict)


class BertForNextSentencePrediction(TaskModel):
    """Next sentence prediction: class 0 means that the second sentence follows the first.

    Args:
        config: The configuration, whose ``model_type`` is ``"bert"``.
        backend: As in `BertModel`.

    Raises:
        ValueError: If ``config.model_type`` is not ``"bert"``, or if `backend` is unknown.

    Examples:
        >>> import torch
        >>> from fastbert import BertConfig, BertForNextSentencePrediction
        >>> config = BertConfig.preset("tiny", vocab_size=8192)
        >>> model = BertForNextSentencePrediction(config).eval()
        >>> ids = torch.tensor([[2, 7, 3, 8, 3]])
        >>> token_types = torch.tensor([[0, 0, 0, 1, 1]])
        >>> model(ids, token_type_ids=token_types).logits.shape
        torch.Size([1, 2])
    """

    def __init__(self, config: BertConfig, *, backend: str | None = None) -> None:
        """Create the modules and initialise their parameters."""
        super().__init__(config, backend=backend)
        self.cls = OnlyNSPHead(config, backend)
        self.initialise(self.cls)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        return_dict: bool | None = None,
        **options: Any,
    ) -> Result:
        """Compute the logits and the cross entropy.

        Args:
            input_ids: As in `BertModel.forward`.
            attention_mask: As in `BertModel.forward`.
            token_type_ids: As in `BertModel.forward`.
            position_ids: As in `BertModel.forward`.
            inputs_embeds: As in `BertModel.forward`.
            labels: Integers 0 and 1 of shape ``(B,)`` or ``(B, 1)``; 0 if the second sentence
                follows the first.
            return_dict: As in `BertModel.forward`.
            **options: Keyword arguments of `BertModel.encode`.

        Returns:
            ``logits`` of shape ``(B, 2)``; ``loss`` is None without labels.

        Raises:
            ValueError: As in `BertModel.forward`, or if a label is out of range or the labels have
                the wrong shape.
            TypeError: As in `BertModel.forward`, or if labels are not integers.
        """
        encoded = self.bert.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            reads=first_tokens,
            **options,
        )
        logits = self.cls(self.bert.pool(encoded))
        loss = None if labels is None else cross_entropy("labels", logits, labels.view(-1))
        output = NextSentencePredictorOutput(
            loss, logits, encoded.hidden_states, encoded.attentions
        )
        return self._asked(output, return_dict)
