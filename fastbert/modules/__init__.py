"""BERT models with the names, arguments and outputs of transformers' BERT classes."""

from fastbert.modules.bert import BertModel
from fastbert.modules.models import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from fastbert.modules.outputs import (
    BaseModelOutputWithPooling,
    BertForPreTrainingOutput,
    MaskedLMOutput,
    ModelOutput,
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from fastbert.modules.pooling import pool
from fastbert.modules.pretrained import BertPreTrainedModel

__all__ = [
    "BaseModelOutputWithPooling",
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForPreTrainingOutput",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertModel",
    "BertPreTrainedModel",
    "MaskedLMOutput",
    "ModelOutput",
    "MultipleChoiceModelOutput",
    "NextSentencePredictorOutput",
    "QuestionAnsweringModelOutput",
    "SequenceClassifierOutput",
    "TokenClassifierOutput",
    "pool",
]
