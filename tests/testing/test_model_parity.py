"""A pre-training step passes on every backend of this machine, and a broken model fails."""

from __future__ import annotations

import pytest
import torch
from quick_cases import long_case

from fastbert import ops
from fastbert.ops import backend as backends
from fastbert.testing.model_parity import check_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = [
    None,
    *(
        name
        for name in backends.BACKENDS
        if backends.refusal("layer_norm", name, backends.Request(DEVICE, torch.float32)) is None
    ),
]


@pytest.mark.parametrize(
    "backend", [long_case(name) if name == "triton" else name for name in BACKENDS]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pretraining_step(backend, dtype):
    rows = check_step(backend, dtype, DEVICE)
    assert {"mlm_loss", "nsp_loss", "dembeddings", "dattention.self", "dcls"} <= {
        row.tensor for row in rows
    }
    failed = [row.detail for row in rows if not row.passed]
    assert not failed, "\n".join(failed)


def test_a_model_that_ignores_padding_fails(monkeypatch):
    """A model without masks fails on the reference backend, which calls each operation."""

    def unmasked(qkv, cu_seqlens, max_seqlen, **options):
        return right(qkv, cu_seqlens[[0, -1]], qkv.shape[0], **options)

    right = ops.attention_qkvpacked
    monkeypatch.setattr(ops, "attention_qkvpacked", unmasked)
    assert not all(row.passed for row in check_step("reference", torch.float32, DEVICE))
