"""BERT with a head: one model for each pre-training and fine-tuning task.

Arguments, outputs, losses and state-dict names match the transformers classes with the same names.
Padding is different on purpose. Nothing is computed at padded positions, so logits are 0 and labels
do not count there. In question answering, these logits are the lowest number of the dtype instead.
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
