"""BERT with a head: one model for each pre-training and fine-tuning task.

Arguments, outputs, losses and state-dict names match the transformers classes with the same names.
Only padding is treated differently. Nothing is computed at padded positions, so their logits are 0
and their labels do not count. In question answering, the logits of padded positions are the lowest
number of the dtype instead of 0.
"""

from fastbert.modules.models.classification import (
    BertForSequenceClassification,
    BertForTokenClassification,
)
from fastbert.modules.models.multiple_choice import BertForMultipleChoice
from fastbert.modules.models.pretraining import (
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForPreTraining,
)
from fastbert.modules.models.question_answering import BertForQuestionAnswering

__all__ = [
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
]
