"""Fine-tuning: classification, regression, tags of words and answers to questions."""

from fastbert.finetuning.classify import ClassifyOptions
from fastbert.finetuning.loop import FinetuneResult, finetune
from fastbert.finetuning.options import FinetuneOptions
from fastbert.finetuning.predict import Prediction, predict

__all__ = [
    "ClassifyOptions",
    "FinetuneOptions",
    "FinetuneResult",
    "Prediction",
    "finetune",
    "predict",
]
