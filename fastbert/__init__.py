"""fastbert: fused kernels and modules for BERT-family encoders, checked against a plain reference.

All names except `BertConfig` and ``__version__`` are imported on first use, so that
``import fastbert`` stays fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastbert.config import BertConfig
from fastbert.version import __version__

if TYPE_CHECKING:
    from fastbert import ops, reference
    from fastbert.inference import graphed, quantize
    from fastbert.integrations.accelerate import accelerate, restore
    from fastbert.modules import (
        BertForMaskedLM,
        BertForMultipleChoice,
        BertForNextSentencePrediction,
        BertForPreTraining,
        BertForQuestionAnswering,
        BertForSequenceClassification,
        BertForTokenClassification,
        BertModel,
    )
    from fastbert.parity import verify
    from fastbert.viewer import view

__all__ = [
    "BertConfig",
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertModel",
    "__version__",
    "accelerate",
    "graphed",
    "ops",
    "quantize",
    "reference",
    "restore",
    "verify",
    "view",
]


def __getattr__(name: str) -> Any:
    if name in ("ops", "reference"):
        return importlib.import_module(f"fastbert.{name}")
    if name in ("graphed", "quantize"):
        return getattr(importlib.import_module("fastbert.inference"), name)
    if name in ("accelerate", "restore"):
        return getattr(importlib.import_module("fastbert.integrations.accelerate"), name)
    if name == "verify":
        return importlib.import_module("fastbert.parity").verify
    if name == "view":
        return importlib.import_module("fastbert.viewer").view
    if name in __all__:
        return getattr(importlib.import_module("fastbert.modules"), name)
    raise AttributeError(f"module 'fastbert' has no attribute {name!r}")
