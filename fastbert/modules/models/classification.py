"""The models that classify a sequence or its tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.config import BertConfig
from fastbert.modules.chosen_rows import first_tokens
from fastbert.modules.heads import classifier_dropout, cross_entropy
from fastbert.modules.linear import Linear
from fastbert.modules.models.task_model import Result, TaskModel, label_rows
from fastbert.modules.outputs import SequenceClassifierOutput, TokenClassifierOutput
from fastbert.ops.arguments import require_shape


class BertForSequenceClassification(TaskModel):
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
        self.classifier = Linear(config.hidden_size, config.num_labels, backend)
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
                of shape ``(B, num_labels)`` and computes the binary cross entropy. If
                ``problem_type`` is None, the problem is regression if ``num_labels`` is 1.
                Otherwise it is single-label classification for integer labels and multi-label
                classification for floating labels.
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
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            reads=first_tokens,
            **options,
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


class BertForTokenClassification(TaskModel):
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
        self.classifier = Linear(config.hidden_size, config.num_labels, backend)
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
            ValueError: As in `BertModel.forward`, or if a label is out of range or the labels have
                the wrong shape.
            TypeError: As in `BertModel.forward`, or if labels are not integers.
        """
        encoded = self.bert.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **options
        )
        logits = self.classifier(self.dropout(encoded.rows))
        loss = None
        if labels is not None:
            rows = label_rows(labels, encoded.layout)
            loss = cross_entropy("labels", logits, rows)
        output = TokenClassifierOutput(
            loss, encoded.layout.given(logits), encoded.hidden_states, encoded.attentions
        )
        return self._asked(output, return_dict)
