"""A pytest plugin that gives PEFT's tests small encoders, stock or accelerated.

PEFT's tests load models from the hub, which this machine may not reach. This plugin makes models of
the same sizes instead. Their random weights are equal in both modes.
"""

from __future__ import annotations

import os
import tempfile
from functools import cache
from typing import Any

import torch
import transformers

import fastbert

MODE = os.environ["CONFORMANCE_MODE"]
HUB = "peft-internal-testing/tiny-random-"
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 512,
}
load = transformers.AutoModel.from_pretrained


@cache
def folder_of(name: str) -> str:
    """Return the folder of a small model of the class `name`, such as ``BertModel``."""
    config = getattr(transformers, name.replace("Model", "Config"))(vocab_size=1124, **SIZES)
    torch.manual_seed(0)
    folder = tempfile.mkdtemp(prefix="fastbert-peft-")
    getattr(transformers, name)(config).save_pretrained(folder)
    return folder


def from_pretrained(name: Any, *arguments: Any, **options: Any) -> Any:
    if str(name).startswith(HUB):
        name = folder_of(str(name).removeprefix(HUB))
    model = load(name, *arguments, **options)
    return fastbert.accelerate(model) if MODE == "fast" else model


transformers.AutoModel.from_pretrained = staticmethod(from_pretrained)
