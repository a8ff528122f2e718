"""The model that chooses one of several sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastbert.config import BertConfig
from fastbert.modules.chosen_rows import first_tokens
from fastbert.modules.heads import classifier_dropout, cross_entropy
from fastbert.modules.linear import Linear
from fastbert.modules.models.task_model import Result, TaskModel
from fastbert.modules.outputs import MultipleChoiceModelOutput


class BertForMultipleChoice(TaskModel):
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
        self.classifier = Linear(config.hidden_size, 1, backend)
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
            position_ids: Positions of shape ``(B, choices, L)``; the default is the same as in
                `BertModel.forward`.
            inputs_embeds: Floating word embeddings of shape ``(B, choices, L, H)`` instead of
                `input_ids`.
            labels: Index of the right choice, integers of shape ``(B,)``.
            return_dict: As in `BertModel.forward`.
            **options: Keyword arguments of `BertModel.encode`.

        Returns:
            ``logits`` of shape ``(B, choices)``; ``loss`` is None without labels. Hidden states and
            attention weights have ``B * choices`` sequences.

        Raises:
            ValueError: As in `BertModel.forward`, or if a label is out of range or the number of
                labels is not B.
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
        encoded = self.bert.encode(*flat, reads=first_tokens, **options)
        logits = self.classifier(self.dropout(self.bert.pool(encoded))).view(leading)
        loss = None if labels is None else cross_entropy("labels", logits, labels.view(-1))
        output = MultipleChoiceModelOutput(loss, logits, encoded.hidden_states, encoded.attentions)
        return self._asked(output, return_dict)
