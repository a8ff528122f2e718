"""The model that finds the answer to a question in a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbert.config import BertConfig
from fastbert.modules.heads import cross_entropy
from fastbert.modules.linear import Linear
from fastbert.modules.models.task_model import Result, TaskModel
from fastbert.modules.outputs import QuestionAnsweringModelOutput


class BertForQuestionAnswering(TaskModel):
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
        self.qa_outputs = Linear(config.hidden_size, config.num_labels, backend)
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
                ``(B, 1)``. As in transformers, a negative index counts as 0, and an index of at
                least ``L`` does not count.
            end_positions: Index of the last token of each answer, as `start_positions`.
            return_dict: As in `BertModel.forward`.
            **options: Keyword arguments of `BertModel.encode`.

        Returns:
            ``start_logits`` and ``end_logits`` of shape ``(B, L)``, or ``(B, max_seqlen)`` for
            packed input. ``loss`` is None if `start_positions` or `end_positions` is None. The
            cross entropy of the starts is 0 if no start counts, and likewise for the ends.

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
