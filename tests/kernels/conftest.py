"""Kernels are tested with the tiles that a GPU gets, also where the interpreter plays them."""

from __future__ import annotations

import os

import torch

# Before anything imports a Triton kernel.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest


@pytest.fixture(autouse=True)
def real_tiles(monkeypatch):
    """Block sizes as on a GPU; one attention test plays the interpreter's own."""
    from fastbert.kernels import tiles

    monkeypatch.setattr(tiles, "IS_INTERPRETED", False)


@pytest.fixture
def general_path(monkeypatch):
    """Attention through its general kernels, whatever ``attention_path`` would choose."""
    from fastbert.kernels import attention_short

    monkeypatch.setattr(attention_short, "attention_path", lambda *_, **__: "general")
