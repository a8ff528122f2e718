"""The kernel tests use the tile sizes of a GPU, also in Triton's interpreter."""

from __future__ import annotations

import os

import torch

# The variable must be set before a Triton kernel is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest


@pytest.fixture(autouse=True)
def real_tiles(monkeypatch):
    """Use the tile sizes of a GPU; one attention test then sets the interpreter's sizes."""
    from fastbert.kernels import tiles

    monkeypatch.setattr(tiles, "IS_INTERPRETED", False)


@pytest.fixture
def general_path(monkeypatch):
    """Use the general attention kernels, even where ``attention_path`` would choose others."""
    from fastbert.kernels import attention_short

    monkeypatch.setattr(attention_short, "attention_path", lambda *_, **__: "general")
