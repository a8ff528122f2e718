"""Pre-training, graphed steps and evaluation."""

from fastbert.training.evaluate import evaluate
from fastbert.training.graphs import GraphedStep, StepResult, graphed_step
from fastbert.training.loop import TrainResult, pretrain
from fastbert.training.options import PretrainOptions

__all__ = [
    "GraphedStep",
    "PretrainOptions",
    "StepResult",
    "TrainResult",
    "evaluate",
    "graphed_step",
    "pretrain",
]
