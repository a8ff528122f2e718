"""Pre-training, training steps as CUDA graphs, and evaluation."""

from fastbert.training.evaluate import evaluate
from fastbert.training.graphs import GraphedStep, StepResult, graphed_step
from fastbert.training.options import PretrainOptions
from fastbert.training.pretraining import TrainResult, pretrain

__all__ = [
    "GraphedStep",
    "PretrainOptions",
    "StepResult",
    "TrainResult",
    "evaluate",
    "graphed_step",
    "pretrain",
]
