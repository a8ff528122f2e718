"""BERT with a head: one model for each pre-training and fine-tuning task.

Arguments, outputs, losses and state-dict names match the transformers classes with the same names.
Padding is different on purpose. Nothing is computed at padded positions, so logits are 0 and labels
do not count there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert.config import BertConfig
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.bert import BertModel, Encoded
from fastbert.modules.heads import (
    LMPredictionHead,
    OnlyMLMHead,
    OnlyNSPHead,
    PreTrainingHeads,
    classifier_dropout,
    cross_entropy,
)
from fastbert.modules.outputs import (
    BertForPreTrainingOutput,
    MaskedLMOutput,
    ModelOutput,
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
    as_asked,
)
from fastbert.modules.pretrained import BertPreTrainedModel
from fastbert.ops.arguments import require_shape

# The output object of a model, or its tuple.
Result = Any


class _TaskModel(BertPreTrainedModel):
    """The base of an encoder named ``bert`` with a head.

    The `options` of every `forward` are the keyword arguments of ``BertModel.encode``.

    Args:
        config: The configuration, whose ``model_type`` is ``"bert"``.
        backend: As in ``BertModel``.
        pooling: Whether the encoder has a pooler.

    Raises:
        ValueError: If ``config.model_type`` is not ``"bert"``, or if `backend` is unknown.
    """

    body_prefix = "bert."

    def __init__(
        self, config: BertConfig, *, backend: str | None = None, pooling: bool = True
    ) -> None:
        """Create the encoder."""
        if config.model_type != "bert":
            raise ValueError(
                f"model_type: got {config.model_type!r}, allowed: bert; of another family "
                "fastbert.BertModel is the encoder, and fastbert.accelerate takes transformers' "
                "models with their heads"
            )
        super().__init__(config, backend)
        self.bert = BertModel(config, add_pooling_layer=pooling, backend=backend)

    def _asked(self, output: ModelOutput, return_dict: bool | None) -> Result:
        return as_asked(output, self.flag("return_dict", return_dict, True))


class _MaskedLM(_TaskModel):
    """The base of the two models with a projection to the vocabulary."""

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

    def _predict(
        self, encoded: Encoded, labels: Tensor | None, output_logits: bool | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute the loss over labelled tokens and the logits in the caller's layout.

        The loss is None without labels. The logits are None if they are not wanted.
        """
        if output_logits is None:
            output_logits = labels is None or not self.training
        head: LMPredictionHead = self.cls.predictions
        rows = None if labels is None else _label_rows("labels", labels, encoded.layout)
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
        """Compute the logits of both tasks and the losses of the given labels.

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
            output_logits: Whether ``prediction_logits`` are computed. None computes them without
                labels or in eval mode.
            return_dict: As in `BertModel.forward`.
            **options: Keyword arguments of `BertModel.encode`.

        Returns:
            ``prediction_logits`` of shape ``(B, L, V)`` and ``seq_relationship_logits`` of shape
            ``(B, 2)``. ``loss`` is ``mlm_loss + nsp_loss`` if both labels are given, and None
            otherwise. ``mlm_loss`` is 0 if no token has a label.

        Raises:
            ValueError: As in `BertModel.forward`, or if a label is out of range.
            TypeError: As in `BertModel.forward`, or if labels are not integers.
        """
        encoded = self.bert.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **options
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
            ValueError: As in `BertModel.forward`, or if a label is out of range.
            TypeError: As in `BertModel.forward`, or if labels are not integers.
        """
        encoded = self.bert.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **options
        )
        loss, logits = self._predict(encoded, labels, output_logits)
        output = MaskedLMOutput(loss, logits, encoded.hidden_states, encoded.attentions)
        return self._asked(output, return_dict)


class BertForNextSentencePrediction(_TaskModel):
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
            labels: Integers of shape ``(B,)`` or ``(B, 1)``: 0 or 1.
            return_dict: As in `BertModel.forward`.
            **options: Keyword arguments of `BertModel.encode`.

        Returns:
            ``logits`` of shape ``(B, 2)``; ``loss`` is None without labels.

        Raises:
            ValueError: As in `BertModel.forward`, or if a label is out of range.
            TypeError: As in `BertModel.forward`, or if labels are not integers.
        """
        encoded = self.bert.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **options
        )
        logits = self.cls(self.bert.pool(encoded))
        loss = None if labels is None else cross_entropy("labels", logits, labels.view(-1))
        output = NextSentencePredictorOutput(
            loss, logits, encoded.hidden_states, encoded.attentions
        )
        return self._asked(output, return_dict)


class BertForSequenceClassification(_TaskModel):
    """Classification of a sequence by one or several labels, or regression to numbers.

    Args:
        config: The configuration, whose ``model_type`` is ``"bert"``. ``num_labels`` is the number
            of logits, and ``problem_type`` chooses the loss.
        backend: As in `BertModel`.

    Raises:
        ValueError: If ``config.model_type`` is not ``"bert"``, or if `backend` is unknown.

    Examples:
        >>> import torch
        >>> from fastbert import BertConfig, BertForSequenceClassification
        >>> config = BertConfig.preset("tiny", vocab_size=8192, num_labels=3)
        >>> model = BertForSequenceClassification(config).eval()
        >>> output = model(torch.tensor([[2, 7, 8, 3]]), labels=torch.tensor([1]))
        >>> output.logits.shape, output.loss.shape
        (torch.Size([1, 3]), torch.Size([]))
    """

    def __init__(self, config: BertConfig, *, backend: str | None = None) -> None:
        """Create the modules and initialise their parameters."""
        super().__init__(config, backend=backend)
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.initialise(self.classifier)

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
        """Compute the logits and the loss that ``config.problem_type`` names.

        Args:
            input_ids: As in `BertModel.forward`.
            attention_mask: As in `BertModel.forward`.
            token_type_ids: As in `BertModel.forward`.
            position_ids: As in `BertModel.forward`.
            inputs_embeds: As in `BertModel.forward`.
            labels: Labels whose form depends on ``config.problem_type``. ``"regression"`` takes
                floating numbers of shape ``(B,)`` or ``(B, num_labels)`` and computes the squared
                error. ``"single_label_classification"`` takes integers of shape ``(B,)`` and
                computes the cross entropy. ``"multi_label_classification"`` takes floating numbers
                of shape ``(B, num_labels)`` and computes the binary cross entropy. If the problem
                type is None, one label means regression; otherwise integers mean a single label and
                floating numbers mean multiple labels.
            return_dict: As in `BertModel.forward`.
            **options: Keyword arguments of `BertModel.encode`.

        Returns:
            ``logits`` of shape ``(B, num_labels)``; ``loss`` is None without labels.

        Raises:
            ValueError: As in `BertModel.forward`, or if a label is out of range or the labels have
                the wrong shape.
            TypeError: As in `BertModel.forward`, or if labels of a single-label problem are not
                integers.
        """
        encoded = self.bert.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **options
        )
        logits = self.classifier(self.dropout(self.bert.pool(encoded)))
        loss = None if labels is None else self._loss(logits, labels)
        output = SequenceClassifierOutput(loss, logits, encoded.hidden_states, encoded.attentions)
        return self._asked(output, return_dict)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        problem = self.config.problem_type
        if problem is None:
            floating = labels.dtype.is_floating_point
            problem = "multi_label_classification" if floating else "single_label_classification"
            problem = "regression" if self.config.num_labels == 1 else problem
        if problem == "single_label_classification":
            return cross_entropy("labels", logits, labels.view(-1))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if problem == "regression" and labels.numel() == logits.numel():
            return F.mse_loss(logits, labels.view(logits.shape).to(logits.dtype))
        require_shape("labels", labels, tuple(logits.shape))
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


class BertForTokenClassification(_TaskModel):
    """Classification of every token, without a pooler.

    Args:
        config: The configuration, whose ``model_type`` is ``"bert"``. ``num_labels`` is the number
            of classes.
        backend: As in `BertModel`.

    Raises:
        ValueError: If ``config.model_type`` is not ``"bert"``, or if `backend` is unknown.

    Examples:
        >>> import torch
        >>> from fastbert import BertConfig, BertForTokenClassification
        >>> config = BertConfig.preset("tiny", vocab_size=8192, num_labels=5)
        >>> model = BertForTokenClassification(config).eval()
        >>> ids = torch.tensor([[2, 7, 8, 3]])
        >>> model(ids, labels=torch.tensor([[-100, 4, 0, -100]])).logits.shape
        torch.Size([1, 4, 5])
    """

    def __init__(self, config: BertConfig, *, backend: str | None = None) -> None:
        """Create the modules and initialise their parameters."""
        super().__init__(config, backend=backend, pooling=False)
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.initialise(self.classifier)

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
        """Compute the logits of every token and the cross entropy.

        Args:
            input_ids: As in `BertModel.forward`.
            attention_mask: As in `BertModel.forward`.
            token_type_ids: As in `BertModel.forward`.
            position_ids: As in `BertModel.forward`.
            inputs_embeds: As in `BertModel.forward`.
            labels: Integers of shape ``(B, L)`` in ``[0, num_labels)``; -100 at tokens that do not
                count. The shape is ``(T,)`` for packed input.
            return_dict: As in `BertModel.forward`.
            **options: Keyword arguments of `BertModel.encode`.

        Returns:
            ``logits`` of shape ``(B, L, num_labels)``, or ``(T, num_labels)`` for packed input.
            ``loss`` is None without labels.

        Raises:
            ValueError: As in `BertModel.forward`, or if a label is out of range.
            TypeError: As in `BertModel.forward`, or if labels are not integers.
        """
        encoded = self.bert.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **options
        )
        logits = self.classifier(self.dropout(encoded.rows))
        loss = None
        if labels is not None:
            rows = _label_rows("labels", labels, encoded.layout)
            loss = cross_entropy("labels", logits, rows)
        output = TokenClassifierOutput(
            loss, encoded.layout.given(logits), encoded.hidden_states, encoded.attentions
        )
        return self._asked(output, return_dict)


class BertForQuestionAnswering(_TaskModel):
    """Prediction of the first and the last token of an answer, without a pooler.

    Logits of padding are the lowest number of the dtype instead of 0. An answer therefore never
    starts or ends at padding, and the softmax over a sequence does not depend on the amount of
    padding.

    Args:
        config: The configuration, whose ``model_type`` is ``"bert"`` and whose ``num_labels`` is 2.
        backend: As in `BertModel`.

    Raises:
        ValueError: If ``config.model_type`` is not ``"bert"``, if ``config.num_labels`` is not 2,
            or if `backend` is unknown.

    Examples:
        >>> import torch
        >>> from fastbert import BertConfig, BertForQuestionAnswering
        >>> config = BertConfig.preset("tiny", vocab_size=8192)
        >>> model = BertForQuestionAnswering(config).eval()
        >>> ids = torch.tensor([[2, 7, 3, 8, 9, 3]])
        >>> start, end = torch.tensor([3]), torch.tensor([4])
        >>> output = model(ids, start_positions=start, end_positions=end)
        >>> output.start_logits.shape, output.loss.shape
        (torch.Size([1, 6]), torch.Size([]))
    """

    def __init__(self, config: BertConfig, *, backend: str | None = None) -> None:
        """Create the modules and initialise their parameters."""
        if config.num_labels != 2:
            raise ValueError(f"num_labels: got {config.num_labels}, allowed: 2 (start and end)")
        super().__init__(config, backend=backend, pooling=False)
        self.qa_outputs = nn.Linear(config.hidden_size, config.num_labels)
        self.initialise(self.qa_outputs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        *,
        return_dict: bool | None = None,
        **options: Any,
    ) -> Result:
        """Compute the logits of start and end, and the mean of both cross entropies.

        Args:
            input_ids: As in `BertModel.forward`.
            attention_mask: As in `BertModel.forward`.
            token_type_ids: As in `BertModel.forward`.
            position_ids: As in `BertModel.forward`.
            inputs_embeds: As in `BertModel.forward`.
            start_positions: Index of the first token of each answer, integers of shape ``(B,)`` or
                ``(B, 1)``. An index of at least ``L`` does not count.
            end_positions: Index of the last token of each answer, as `start_positions`.
            return_dict: As in `BertModel.forward`.
            **options: Keyword arguments of `BertModel.encode`.

        Returns:
            ``start_logits`` and ``end_logits`` of shape ``(B, L)``, or ``(B, max_seqlen)`` for
            packed input. ``loss`` is None unless both positions are given.

        Raises:
            ValueError: As in `BertModel.forward`.
            TypeError: As in `BertModel.forward`, or if positions are not integers.
        """
        encoded = self.bert.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **options
        )
        logits = encoded.layout.padded(self.qa_outputs(encoded.rows))
        exists = encoded.layout.exists()
        if exists is not None:
            lowest = torch.finfo(logits.dtype).min
            logits = logits.masked_fill(~exists.unsqueeze(-1), lowest)
        start, end = (part.squeeze(-1).contiguous() for part in logits.split(1, dim=-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            length = start.shape[1]
            losses = [
                cross_entropy(name, part, where.view(-1).clamp(0, length), ignored=length)
                for name, part, where in (
                    ("start_positions", start, start_positions),
                    ("end_positions", end, end_positions),
                )
            ]
            loss = (losses[0] + losses[1]) / 2
        output = QuestionAnsweringModelOutput(
            loss, start, end, encoded.hidden_states, encoded.attentions
        )
        return self._asked(output, return_dict)


class BertForMultipleChoice(_TaskModel):
    """Choice of the right sequence among several sequences; the input is padded.

    Args:
        config: The configuration, whose ``model_type`` is ``"bert"``.
        backend: As in `BertModel`.

    Raises:
        ValueError: If ``config.model_type`` is not ``"bert"``, or if `backend` is unknown.

    Examples:
        >>> import torch
        >>> from fastbert import BertConfig, BertForMultipleChoice
        >>> config = BertConfig.preset("tiny", vocab_size=8192)
        >>> model = BertForMultipleChoice(config).eval()
        >>> ids = torch.tensor([[[2, 7, 3], [2, 8, 3]]])  # The question has two choices.
        >>> model(ids, labels=torch.tensor([1])).logits.shape
        torch.Size([1, 2])
    """

    def __init__(self, config: BertConfig, *, backend: str | None = None) -> None:
        """Create the modules and initialise their parameters."""
        super().__init__(config, backend=backend)
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.initialise(self.classifier)

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
        """Compute one logit per choice and the cross entropy.

        Args:
            input_ids: Token ids, int64 or int32 of shape ``(B, choices, L)``.
            attention_mask: Mask of shape ``(B, choices, L)``, 1 or True at tokens and 0 at padding.
            token_type_ids: Token types of shape ``(B, choices, L)``; 0 by default.
            position_ids: Positions of shape ``(B, choices, L)``; the default is that of
                `BertModel.forward`.
            inputs_embeds: Floating word embeddings of shape ``(B, choices, L, H)`` in place of
                `input_ids`.
            labels: Index of the right choice, integers of shape ``(B,)``.
            return_dict: As in `BertModel.forward`.
            **options: Keyword arguments of `BertModel.encode`.

        Returns:
            ``logits`` of shape ``(B, choices)``; ``loss`` is None without labels. Hidden states and
            attention weights have ``B * choices`` sequences.

        Raises:
            ValueError: As in `BertModel.forward`, or if a label is out of range.
            TypeError: As in `BertModel.forward`, or if labels are not integers.
        """
        leading: tuple[int, ...] = ()
        for name, given, dims in (("input_ids", input_ids, 3), ("inputs_embeds", inputs_embeds, 4)):
            if given is None:
                continue
            if given.dim() != dims:
                shape = tuple(given.shape)
                raise ValueError(
                    f"{name}: got shape {shape}, allowed: {dims} dims, (B, choices, …)"
                )
            leading = tuple(given.shape[:2])
        tensors = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        flat = (None if x is None else x.flatten(0, 1) for x in tensors)
        encoded = self.bert.encode(*flat, **options)
        logits = self.classifier(self.dropout(self.bert.pool(encoded))).view(leading)
        loss = None if labels is None else cross_entropy("labels", logits, labels.view(-1))
        output = MultipleChoiceModelOutput(loss, logits, encoded.hidden_states, encoded.attentions)
        return self._asked(output, return_dict)


def _label_rows(name: str, labels: Tensor, layout: BatchLayout) -> Tensor:
    """Return the labels of the tokens, of shape ``(T,)``, without the labels of padding."""
    if not layout.packed:
        require_shape(name, labels, (layout.batch, layout.length))
    return layout.rows(labels)
