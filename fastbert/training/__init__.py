"""Pre-training, graphed steps, evaluation, and a demo that trains and checks a small BERT."""

from fastbert.training.demo import run_demo
from fastbert.training.evaluate import evaluate
from fastbert.training.graphs import GraphedStep, StepResult, graphed_step
from fastbert.training.loop import TrainResult, pretrain
from fastbert.training.options import PretrainOptions
from fastbert.training.report import DemoReport

__all__ = [
    "DemoReport",
    "GraphedStep",
    "PretrainOptions",
    "StepResult",
    "TrainResult",
    "evaluate",
    "graphed_step",
    "pretrain",
    "run_demo",
]
