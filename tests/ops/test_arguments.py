"""The error for bad input of an operation names the argument, its value and the allowed values."""

from __future__ import annotations

import pytest
import torch

from fastbert import ops
from fastbert.ops import backend as backends

Q = torch.randn(2, 3, 5, 8)
X = torch.randn(4, 8)
W = torch.randn(6, 8)
N = torch.ones(8)
CU = torch.tensor([0, 2, 4], dtype=torch.int32)
IDS = torch.zeros(4, dtype=torch.int64)
T = torch.randn(4, 3, 8)
C = torch.randn(4, 4)

BAD_VALUES = {
    "mask": lambda: ops.attention(Q, Q, Q, mask=torch.ones(2, 4, dtype=torch.bool)),
    "bias": lambda: ops.attention(Q, Q, Q, bias=torch.zeros(2, 3, 5, 4)),
    "k": lambda: ops.attention(Q, Q[:, :2], Q[:, :2]),
    "v": lambda: ops.attention(Q, Q, Q[:, :, :4]),
    "q": lambda: ops.attention(Q[0], Q, Q),
    "dropout_p": lambda: ops.attention(Q, Q, Q, dropout_p=1.5),
    "dropout_seed": lambda: ops.attention(
        Q, Q, Q, dropout_p=0.5, dropout_seed=torch.zeros(2, dtype=torch.int64)
    ),
    "window": lambda: ops.attention(Q, Q, Q, window=(-2, 1)),
    "backend": lambda: ops.attention(Q, Q, Q, backend="tensorrt"),
    "cu_seqlens_k": lambda: ops.attention_varlen(T, T, T, CU, CU[:2]),
    "weight": lambda: ops.layer_norm(X, N[:4], N),
    "residual": lambda: ops.layer_norm(X, N, N, residual=X[:2]),
    "x_bias": lambda: ops.layer_norm(X, N, N, x_bias=N[:3]),
    "approximate": lambda: ops.linear_gelu(X, W, None, approximate="sigmoid"),
    "activation": lambda: ops.feed_forward(X, W, None, W.t(), None, activation="swish"),
    "w2": lambda: ops.feed_forward(X, W, None, W, None),
    "labels": lambda: ops.linear_cross_entropy(X, W, None, IDS + 6),
    "reduction": lambda: ops.linear_cross_entropy(X, W, None, IDS, reduction="max"),
    "cu_seqlens": lambda: ops.splade(X, W, cu_seqlens=CU + 1),
    "hidden": lambda: ops.splade(T, W, cu_seqlens=CU),
    "positions": lambda: ops.embedding(IDS, IDS, IDS[:2], W, W, W, N, N),
    "token_types": lambda: ops.embedding(IDS, None, IDS, W, W, W, N, None),
    "type_table": lambda: ops.embedding(IDS, IDS, None, W, None, None, N, N),
    "position_table": lambda: ops.embedding(IDS, None, IDS, W, None, None, N, N),
    "x": lambda: ops.rotary(T[..., :7], C, C, heads=2),
    "cos": lambda: ops.rotary(T, C[:, :3], C, heads=2),
    "heads": lambda: ops.rotary(T, C, C, heads=4),
}
BAD_TYPES = {
    "mask": lambda: ops.attention(Q, Q, Q, mask=torch.ones(2, 5)),
    "q": lambda: ops.attention(Q.long(), Q.long(), Q.long()),
    "cu_seqlens_q": lambda: ops.attention_varlen(T, T, T, CU.long()),
    "x": lambda: ops.layer_norm(X.long(), N, N),
    "labels": lambda: ops.linear_cross_entropy(X, W, None, IDS.float()),
    "cu_seqlens": lambda: ops.splade(X, W, cu_seqlens=CU.long()),
    "hidden": lambda: ops.splade(X.long(), W, cu_seqlens=CU),
    "ids": lambda: ops.embedding(IDS.float(), IDS, IDS, W, W, W, N, N),
    "cos": lambda: ops.rotary(T, C.bfloat16(), C, heads=2),
    "sin": lambda: ops.rotary(T, C, C.double(), heads=2),
}


@pytest.mark.parametrize("argument", BAD_VALUES)
def test_bad_value(argument):
    with pytest.raises(ValueError, match=rf"^{argument}: (got .*, allowed: |.*)"):
        BAD_VALUES[argument]()


@pytest.mark.parametrize("argument", BAD_TYPES)
def test_bad_type(argument):
    with pytest.raises(TypeError, match=rf"^{argument}: got .*, allowed: "):
        BAD_TYPES[argument]()


R = torch.arange(9, dtype=torch.int32)
P = torch.randn(9, 3, 8)
S = (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int32))
# Valid arguments of attention with every relative term, dense and packed.
RELATIVE = {
    "q": Q, "k": Q, "v": Q, "index": R, "position_keys": P, "position_queries": P,
    "position_bias": P[..., 0], "segments": S, "segment_scores": Q[..., 0],
}  # fmt: skip
PACKED = RELATIVE | {
    "q": T, "k": T, "v": T, "segments": (IDS, IDS), "segment_scores": T[..., 0],
    "cu_seqlens_q": CU, "cu_seqlens_k": CU,
}  # fmt: skip
BAD_RELATIVE = [
    (RELATIVE, {"q": Q[0]}, ValueError, "q"),
    (RELATIVE, {"q": Q.double()}, ValueError, "k"),
    (RELATIVE, {"k": Q[:, :2], "v": Q[:, :2]}, ValueError, "k"),
    (RELATIVE, {"v": Q[:, :, :4]}, ValueError, "v"),
    (RELATIVE, {"index": R.long()}, TypeError, "index"),
    (RELATIVE, {"index": R[:8]}, ValueError, "index"),
    (RELATIVE, {"index": R[:7]}, ValueError, "index"),
    (RELATIVE, {"index": R[None]}, ValueError, "index"),
    (RELATIVE, {"index": R + 1}, ValueError, "index"),
    (RELATIVE, {"index": R - 1}, ValueError, "index"),
    (RELATIVE, {"position_keys": P[:, :2]}, ValueError, "position_keys"),
    (RELATIVE, {"position_keys": P.bfloat16()}, ValueError, "position_keys"),
    (RELATIVE, {"position_keys": P[:8]}, ValueError, "position_queries"),
    (RELATIVE, {"position_queries": P[..., :4]}, ValueError, "position_queries"),
    (RELATIVE, {"position_queries": P.double()}, ValueError, "position_queries"),
    (RELATIVE, {"position_bias": P}, ValueError, "position_bias"),
    (RELATIVE, {"position_bias": P[..., 0].bfloat16()}, ValueError, "position_bias"),
    (
        RELATIVE,
        {"position_keys": None, "position_queries": None, "position_bias": None},
        ValueError,
        "position_keys, position_queries, position_bias",
    ),
    (RELATIVE, {"segments": None}, ValueError, "segment_scores"),
    (RELATIVE, {"segment_scores": None}, ValueError, "segment_scores"),
    (RELATIVE, {"segment_scores": Q[..., :4, 0]}, ValueError, "segment_scores"),
    (RELATIVE, {"segment_scores": Q[..., 0].double()}, ValueError, "segment_scores"),
    (RELATIVE, {"segments": (S[0][:, :4], S[1])}, ValueError, "q_segments"),
    (RELATIVE, {"segments": (S[0], S[1].float())}, TypeError, "k_segments"),
    (RELATIVE, {"mask": torch.ones(2, 4, dtype=torch.bool)}, ValueError, "mask"),
    (RELATIVE, {"mask": torch.ones(2, 5)}, TypeError, "mask"),
    (RELATIVE, {"dropout_p": 1.5}, ValueError, "dropout_p"),
    (RELATIVE, {"dropout_p": 0.5, "dropout_seed": IDS[:2]}, ValueError, "dropout_seed"),
    (RELATIVE, {"backend": "cuda"}, ValueError, "backend"),
    (RELATIVE, {"backend": "tensorrt"}, ValueError, "backend"),
    (PACKED, {"q": Q}, ValueError, "q"),
    (PACKED, {"cu_seqlens_q": CU.long()}, TypeError, "cu_seqlens_q"),
    (PACKED, {"cu_seqlens_k": CU[:2]}, ValueError, "cu_seqlens_k"),
    (PACKED, {"segments": (IDS[:3], IDS)}, ValueError, "q_segments"),
    (PACKED, {"segment_scores": T[..., 0].t()}, ValueError, "segment_scores"),
    (PACKED, {"index": R[:3], "max_seqlen_k": 4}, ValueError, "index"),
]


@pytest.mark.parametrize(("given", "change", "error", "argument"), BAD_RELATIVE)
def test_bad_relative_attention(given, change, error, argument):
    ops.relative_attention(**given)
    with pytest.raises(error, match=rf"^{argument}: got .*, allowed: |^{argument}: '\w+' cannot"):
        ops.relative_attention(**given | change)


def test_mask_of_unpad():
    with pytest.raises(ValueError, match=r"^mask: got shape \(2, 4\), allowed: \(2, 5\)"):
        ops.unpad(torch.randn(2, 5, 3), torch.ones(2, 4))


def test_an_id_out_of_range_raises():
    with pytest.raises(IndexError):
        ops.embedding(IDS + 6, IDS, IDS, W, W, W, N, N)


def test_an_explicit_backend_that_cannot_serve_says_why():
    with pytest.raises(
        ValueError, match=r"'cuda' cannot serve layer_norm: the tensors are on cpu, allowed: cuda$"
    ):
        ops.layer_norm(X, N, N, backend="cuda")
    with pytest.raises(
        ValueError, match="'triton' cannot serve attention: the dtype is float64, allowed: float32"
    ):
        ops.attention(Q.double(), Q.double(), Q.double(), backend="triton")


def test_every_resolution_gives_a_reason():
    for op in backends.TABLES:
        for dtype in backends.TABLES[op]["reference"].dtypes:
            choice = backends.resolve(op, None, backends.Request("cpu", dtype))
            assert choice.backend in backends.BACKENDS
            assert choice.reason


def test_the_default_request_comes_from_the_environment(monkeypatch):
    monkeypatch.setattr(backends, "DEFAULT_REQUEST", "reference")
    request = backends.Request("cpu", torch.float32)
    assert backends.resolve("layer_norm", None, request) == ("reference", "asked for")
    # The default backend is only a preference: an operation that it lacks uses another backend.
    monkeypatch.setattr(backends, "DEFAULT_REQUEST", "triton")
    monkeypatch.delitem(backends.TABLES["embedding"], "triton")
    assert backends.resolve("embedding", None, request).backend in ("cpu", "reference")
    monkeypatch.setattr(backends, "DEFAULT_REQUEST", "nonsense")
    with pytest.raises(ValueError, match="nonsense"):
        backends.resolve("layer_norm", None, request)
