"""A whole BertForPreTraining step with dropout: both losses and the gradient of every parameter."""

from __future__ import annotations

import pytest
import torch

from fastbert.ops import backend as backends
from fastbert.testing import model_parity
from fastbert.testing.model_parity import check_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = [
    name
    for name in backends.BACKENDS
    if backends.refusal("layer_norm", name, backends.Request(DEVICE, torch.float32)) is None
]
REASON = "roundings early in the backward pass are shared by every gradient behind them"


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_gradient_of_a_training_step(backend):
    rows = check_step(backend, torch.float32, DEVICE, each=True, factor=3.0, reason=REASON)
    assert len(rows) == 48
    failed = [row.detail for row in rows if not row.passed]
    assert not failed, "\n".join(failed)


def test_another_dropout_mask_fails(monkeypatch):
    """The step is not blind to dropout: with other seeds on one side nothing agrees."""
    seeds = model_parity.dropout_seeds
    monkeypatch.setattr(model_parity, "dropout_seeds", lambda *a: seeds(*a)[::-1])
    rows = check_step(None, torch.float32, DEVICE)
    assert not any(row.passed for row in rows)
