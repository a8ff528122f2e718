"""Inference with a trained model: embeddings, dynamic batching, CUDA graphs, int8 weights."""

from fastbert.inference.dynamic_batching import DynamicBatcher, OverloadedError
from fastbert.inference.embedder import Embedder
from fastbert.inference.graphed_model import GraphedModel, graphed
from fastbert.inference.quantization import quantize

__all__ = [
    "DynamicBatcher",
    "Embedder",
    "GraphedModel",
    "OverloadedError",
    "graphed",
    "quantize",
]
