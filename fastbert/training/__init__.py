"""Pre-training, evaluation, and a demo that trains, checks and times a small BERT."""

from fastbert.training.demo import run_demo
from fastbert.training.evaluate import evaluate
from fastbert.training.loop import TrainResult, pretrain
from fastbert.training.options import PretrainOptions
from fastbert.training.report import DemoReport

__all__ = [
    "DemoReport",
    "PretrainOptions",
    "TrainResult",
    "evaluate",
    "pretrain",
    "run_demo",
]
