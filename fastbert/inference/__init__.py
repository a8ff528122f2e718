"""Inference with a trained model: embeddings of texts, CUDA graphs, and int8 weights on the CPU."""

from fastbert.inference.embedder import Embedder
from fastbert.inference.graphed_model import GraphedModel, graphed
from fastbert.inference.quantization import quantize

__all__ = ["Embedder", "GraphedModel", "graphed", "quantize"]
