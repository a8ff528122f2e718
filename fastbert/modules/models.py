"""BERT with a head: pre-training, masked LM, next sentence, classification, tokens, answers,
choices.

Arguments, outputs, losses and state-dict names are those of transformers' classes of the same
names. Where padding is concerned they differ on purpose: nothing is computed at padded positions,
so logits are 0 there and labels there do not count.
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

Result = Any  # the output class of the model, or its tuple


class _TaskModel(BertPreTrainedModel):
    """An encoder named ``bert`` and a head. The ``options`` of every ``forward`` are the keywords
    of ``BertModel.encode``."""

    body_prefix = "bert."

    def __init__(
        self, config: BertConfig, *, backend: str | None = None, pooling: bool = True
    ) -> None:
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
    """What the two models with a vocabulary projection share."""

    cls: OnlyMLMHead

    def tied(self) -> dict[str, str]:
        if not self.config.tie_word_embeddings:
            return {}
        return {
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        }

    def get_output_embeddings(self) -> nn.Linear:
        return self.cls.predictions.decoder

    def _predict(
        self, encoded: Encoded, labels: Tensor | None, output_logits: bool | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The loss over labelled tokens and the logits in the caller's layout, each None when not
        wanted."""
        if output_logits is None:
            output_logits = labels is None or not self.training
        head: LMPredictionHead = self.cls.predictions
        rows = None if labels is None else _label_rows("labels", labels, encoded.layout)
        loss, logits = head(encoded.rows, rows, output_logits)
        return loss, None if logits is None else encoded.layout.given(logits)


class BertForPreTraining(_MaskedLM):
    """Masked LM and next sentence prediction (Devlin et al. 2019, section 3.1)."""

    def __init__(self, config: BertConfig, *, backend: str | None = None) -> None:
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
        """labels (B, L), or (T,) for packed input, in [0, V) or -100; next_sentence_label (B,): 0 =
        follows.

        ``loss`` = ``mlm_loss`` + ``nsp_loss`` when both labels are given. ``prediction_logits`` (B,
        L, V) are computed when there are no labels or the model is in eval mode; ``output_logits``
        overrides. The masked-LM loss of a batch without any labelled token is 0.
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
    """Masked LM alone; no pooler."""

    def __init__(self, config: BertConfig, *, backend: str | None = None) -> None:
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
        """labels, logits and ``output_logits`` as in ``BertForPreTraining``."""
        encoded = self.bert.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **options
        )
        loss, logits = self._predict(encoded, labels, output_logits)
        output = MaskedLMOutput(loss, logits, encoded.hidden_states, encoded.attentions)
        return self._asked(output, return_dict)


class BertForNextSentencePrediction(_TaskModel):
    """Does the second sentence follow the first? 0 = it does."""

    def __init__(self, config: BertConfig, *, backend: str | None = None) -> None:
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
        """labels (B,) or (B, 1): 0 or 1."""
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
    """One or several labels, or numbers, for a whole sequence."""

    def __init__(self, config: BertConfig, *, backend: str | None = None) -> None:
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
        """labels by ``config.problem_type``: "regression" floating (B,) or (B, num_labels), squared
        error; "single_label_classification" int (B,), cross entropy; "multi_label_classification"
        floating (B, num_labels), binary cross entropy. Without one, num_labels = 1 is regression,
        integer labels are single, floating ones multi."""
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
    """A label for every token; no pooler."""

    def __init__(self, config: BertConfig, *, backend: str | None = None) -> None:
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
        """labels (B, L), or (T,) for packed input, in [0, num_labels) or -100."""
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
    """Where the answer starts and ends; no pooler.

    Logits of padding are the dtype's lowest number, not 0: an answer never starts there, and the
    softmax over the sequence does not depend on how far it was padded.
    """

    def __init__(self, config: BertConfig, *, backend: str | None = None) -> None:
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
        """start_positions, end_positions int (B,) or (B, 1): token positions; those at L or beyond
        do not count. The loss is the mean of both cross entropies. Logits (B, L), for packed input
        (B, max_seqlen)."""
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
    """Which of several sequences is right? Padded input only."""

    def __init__(self, config: BertConfig, *, backend: str | None = None) -> None:
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
        """input_ids (B, choices, L) or inputs_embeds (B, choices, L, H), the others (B, choices,
        L); labels int (B,): the right choice. Hidden states and attentions have B · choices
        sequences."""
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
    """Labels of the caller's layout → (T,), those of padding dropped."""
    if not layout.packed:
        require_shape(name, labels, (layout.batch, layout.length))
    return layout.rows(labels)
