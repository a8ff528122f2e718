"""A C++ operator's error for bad input names the argument, its value and the allowed values."""

from __future__ import annotations

import pytest
import torch
from _layer_norm import EPS, problem

from fastbert.activations import ACTIVATIONS, UNGATED


@pytest.fixture
def arguments():
    case = problem(4, 8, torch.float32)
    return {
        "x": case.x,
        "weight": case.weight,
        "bias": case.bias,
        "residual": case.residual,
        "x_bias": case.x_bias,
        "seed": case.seed,
        "dropout_p": 0.1,
        "eps": EPS,
    }


BAD_LAYER_NORM = [
    ("x", torch.zeros(4, 8, 1), ValueError),
    ("x", torch.zeros(4, 0), ValueError),
    ("x", torch.zeros(4, 8, dtype=torch.float64), TypeError),
    ("x", torch.zeros(4, 8, dtype=torch.int32), TypeError),
    ("weight", torch.zeros(7), ValueError),
    ("weight", torch.zeros(8, dtype=torch.int64), TypeError),
    ("bias", torch.zeros(1, 8), ValueError),
    ("residual", torch.zeros(3, 8), ValueError),
    ("residual", torch.zeros(4, 8, dtype=torch.bfloat16), TypeError),
    ("x_bias", torch.zeros(9), ValueError),
    ("seed", None, ValueError),
    ("seed", torch.zeros(2, dtype=torch.int64), ValueError),
    ("seed", torch.zeros(1), TypeError),
    ("dropout_p", 1.5, ValueError),
    ("dropout_p", float("nan"), ValueError),
    ("eps", -1.0, ValueError),
]


@pytest.mark.parametrize(("name", "value", "error"), BAD_LAYER_NORM)
def test_layer_norm_names_the_argument(operators, arguments, name, value, error):
    with pytest.raises(error, match=rf"^{name}: got .*allowed"):
        operators.layer_norm_forward(**(arguments | {name: value}))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("dy", torch.zeros(4, 7), ValueError),
        ("dy", torch.zeros(4, 8, dtype=torch.float16), TypeError),
        ("mean", torch.zeros(5), ValueError),
        ("rstd", torch.zeros(4, dtype=torch.float64), TypeError),
    ],
)
def test_layer_norm_backward_names_the_argument(operators, arguments, name, value, error):
    del arguments["bias"], arguments["eps"]
    arguments |= {"dy": torch.zeros(4, 8), "mean": torch.zeros(4), "rstd": torch.ones(4)}
    arguments["has_bias"] = True
    with pytest.raises(error, match=rf"^{name}: got .*allowed"):
        operators.layer_norm_backward(**(arguments | {name: value}))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("h", torch.zeros(8), ValueError),
        ("h", torch.zeros(4, 8, dtype=torch.float64), TypeError),
        ("bias", torch.zeros(4), ValueError),
        ("dy", torch.zeros(8, 4), ValueError),
        ("activation", "erf", ValueError),
    ],
)
def test_activation_names_the_argument(operators, name, value, error):
    arguments = {"dy": torch.zeros(4, 8), "h": torch.zeros(4, 8), "bias": torch.zeros(8)}
    arguments |= {"activation": "gelu", "sum_rows": True, "recompute": False}
    with pytest.raises(error, match=rf"^{name}: got .*allowed"):
        operators.activation_backward(**(arguments | {name: value}))


def test_the_names_of_activations_are_those_of_the_python_table(operators):
    x, weight = torch.zeros(4, 8), torch.zeros(6, 8)
    for call, allowed in (
        (lambda: operators.activation_forward(x, None, "none"), tuple(ACTIVATIONS)),
        (lambda: operators.linear(x, weight, None, None, "geglu", False), ("none", *UNGATED)),
    ):
        listed = ", ".join(f"'{name}'" for name in allowed)
        with pytest.raises(ValueError, match=rf"^activation: got '\w+', allowed: {listed}(\n|$)"):
            call()


def ends(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


BAD_ATTENTION = [
    ("mask", torch.ones(2, 1, 1, 7, dtype=torch.bool), ValueError),
    ("mask", torch.ones(2, 2, 1, 9, dtype=torch.bool), ValueError),
    ("mask", torch.ones(2, 9, dtype=torch.bool), ValueError),
    ("mask", torch.ones(2, 1, 1, 9), TypeError),
    ("bias", torch.zeros(2, 3, 8, 9), ValueError),
    ("bias", torch.zeros(2, 3, 9, 9, dtype=torch.int64), TypeError),
    ("cu_seqlens_q", ends(9, 9).long(), TypeError),
    ("cu_seqlens_q", ends(9, 9, 9), ValueError),
    ("cu_seqlens_q", torch.tensor([1, 9, 18]).int(), ValueError),
    ("cu_seqlens_k", ends(9), ValueError),
    ("cu_seqlens_k", ends(3, 3, 3), ValueError),
    ("cu_seqlens_k", torch.tensor([0, 9, 3]).int(), ValueError),
    ("cu_seqlens_k", None, ValueError),
    ("max_seqlen_q", 8, ValueError),
    ("max_seqlen_k", -1, ValueError),
    ("left", -2, ValueError),
]


@pytest.mark.parametrize(("name", "value", "error"), BAD_ATTENTION)
def test_attention_names_the_argument(operators, name, value, error):
    packed = name.startswith(("cu_seqlens", "max_seqlen"))
    q, k, v = torch.randn(3, 18, 3, 8) if packed else torch.randn(3, 2, 3, 9, 8)
    options = {
        "mask": None, "bias": None, "cu_seqlens_q": ends(9, 9) if packed else None,
        "cu_seqlens_k": ends(9, 9) if packed else None, "seed": None, "max_seqlen_q": 9,
        "max_seqlen_k": 9, "dropout_p": 0.0, "scale": 0.3, "left": -1, "right": -1,
    }  # fmt: skip
    operators.attention_forward(q, k, v, **options)
    with pytest.raises(error, match=rf"^{name}: got .*allowed"):
        operators.attention_forward(q, k, v, **(options | {name: value}))


NUMBERS, ROWS = torch.arange(17).int(), torch.zeros(2, 9, dtype=torch.int64)
BAD_RELATIVE_ATTENTION = [
    ("index", NUMBERS.long(), TypeError),
    ("index", NUMBERS[:16], ValueError),
    ("index", NUMBERS[:15], ValueError),
    ("index", NUMBERS[None], ValueError),
    ("index", NUMBERS - 1, ValueError),
    ("index", NUMBERS + 1, ValueError),
    ("position_keys", torch.zeros(16, 3, 8), ValueError),
    ("position_keys", torch.zeros(17, 3, 8).half(), TypeError),
    ("position_queries", torch.zeros(17, 3, 7), ValueError),
    ("position_queries", torch.zeros(17, 3, 8).double(), TypeError),
    ("position_bias", torch.zeros(17, 2), ValueError),
    ("position_bias", torch.zeros(17, 3).bfloat16(), TypeError),
    ("position_bias", torch.zeros(17, 3).bool(), TypeError),
    ("q_segments", ROWS[:, :8], ValueError),
    ("q_segments", ROWS.bool(), TypeError),
    ("k_segments", ROWS[0], ValueError),
    ("k_segments", ROWS.float(), TypeError),
    ("segment_scores", None, ValueError),
    ("segment_scores", torch.zeros(2, 3, 8), ValueError),
    ("segment_scores", torch.zeros(2, 3, 9).double(), TypeError),
    ("mask", torch.ones(2, 1, 1, 7, dtype=torch.bool), ValueError),
]


@pytest.mark.parametrize(("name", "value", "error"), BAD_RELATIVE_ATTENTION)
def test_relative_attention_names_the_argument(operators, name, value, error):
    q, k, v = torch.randn(3, 2, 3, 9, 8)
    options = {
        "index": NUMBERS, "position_keys": torch.randn(17, 3, 8),
        "position_queries": torch.randn(17, 3, 8), "position_bias": torch.randn(17, 3),
        "q_segments": ROWS, "k_segments": ROWS, "segment_scores": torch.randn(2, 3, 9),
        "mask": None, "cu_seqlens_q": None, "cu_seqlens_k": None, "seed": None,
        "max_seqlen_q": 9, "max_seqlen_k": 9, "dropout_p": 0.0, "scale": 0.3,
    }  # fmt: skip
    operators.relative_attention_forward(q, k, v, **options)
    # A table may have more rows than the other tables have, and then these are named.
    named = "position_\\w+" if name.startswith("position") else name
    with pytest.raises(error, match=rf"^{named}: got .*allowed"):
        operators.relative_attention_forward(q, k, v, **(options | {name: value}))


def test_relative_attention_needs_a_table(operators):
    q = torch.randn(2, 3, 9, 8)
    nothing = [None] * 10
    with pytest.raises(ValueError, match=r"^position_keys: got None, allowed: a tensor"):
        operators.relative_attention_forward(q, q, q, NUMBERS, *nothing, 9, 9, 0.0, 0.3)
