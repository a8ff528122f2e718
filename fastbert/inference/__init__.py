"""Faster inference with a trained model: CUDA graphs, and int8 weights on the CPU."""

from fastbert.inference.graphed_model import GraphedModel, graphed
from fastbert.inference.quantization import quantize

__all__ = ["GraphedModel", "graphed", "quantize"]
