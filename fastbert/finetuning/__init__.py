"""Fine-tuning: classification, regression, tags of words and answers to questions."""

from fastbert.finetuning.answer import AnswerOptions
from fastbert.finetuning.classify import ClassifyOptions
from fastbert.finetuning.finetuning import FinetuneResult, finetune
from fastbert.finetuning.options import FinetuneOptions
from fastbert.finetuning.predict import Prediction, predict
from fastbert.finetuning.tag import TagOptions

__all__ = [
    "AnswerOptions",
    "ClassifyOptions",
    "FinetuneOptions",
    "FinetuneResult",
    "Prediction",
    "TagOptions",
    "finetune",
    "predict",
]
