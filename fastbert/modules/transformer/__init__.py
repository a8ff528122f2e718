"""The encoder–decoder of Vaswani et al. 2017, which reads and writes Marian checkpoints."""

from fastbert.modules.transformer.generation import GenerationSettings
from fastbert.modules.transformer.model import Source, Transformer
from fastbert.modules.transformer.outputs import TransformerOutput
from fastbert.transformer_config import TransformerConfig

__all__ = [
    "GenerationSettings",
    "Source",
    "Transformer",
    "TransformerConfig",
    "TransformerOutput",
]
