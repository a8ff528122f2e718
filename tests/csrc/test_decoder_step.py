"""A step of a decoder is as exact as PyTorch, and hypotheses do not change one another."""

from __future__ import annotations

import pytest
import torch

from fastbert import ops, reference
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLACES = ("parameters", "cache", "source_cache", "hidden")


def draw(rows, heads, head_dim, inner, position, lengths, layers=2, activation="relu", **options):
    """Return the arguments of a step whose earlier tokens are in slots that were drawn."""
    width, slots = heads * head_dim, rows + 2
    shapes = [
        *((3 * width, width), (width, width), None, (width, width), (width, width), None),
        *((inner, width), (width, inner), None),
    ]
    parameters = []
    for shape in shapes * layers:
        if shape is None:
            parameters += [1.0 + torch.randn(width) / 4, torch.randn(width) / 4]
        else:
            parameters += [torch.randn(shape) * shape[1] ** -0.5, torch.randn(shape[0]) / 4]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    table = torch.randint(slots, (rows, position + 3), dtype=torch.int32)
    return {
        "hidden": torch.randn(rows, width),
        "parameters": parameters,
        "cache": torch.randn(layers, 2, slots, heads, position + 3, head_dim),
        "slots": table,
        "position": position,
        "source_cache": torch.randn(layers, 2, heads, int(ends[-1]), head_dim),
        "cu_seqlens": ends,
        "sources": torch.randint(len(lengths), (rows,), dtype=torch.int32),
        "heads": heads, "pre_norm": False, "eps": 1e-5, "activation": activation,
    } | options  # fmt: skip


def to(dtype, given):
    """Return a deep copy of the arguments with the floating tensors in ``dtype``."""
    copied = dict(given)
    for name in PLACES:
        value = given[name]
        copied[name] = (
            [t.to(dtype, copy=True) for t in value]
            if isinstance(value, list)
            else value.to(dtype, copy=True)
        )
    return copied


CASES = {
    "first token": {"rows": 3, "heads": 2, "head_dim": 8, "position": 0, "lengths": [5, 1]},
    "one hypothesis": {"rows": 1, "heads": 4, "head_dim": 16, "position": 6, "lengths": [9]},
    "wide head": {"rows": 5, "heads": 2, "head_dim": 136, "position": 20, "lengths": [3, 40]},
    "odd head": {"rows": 9, "heads": 3, "head_dim": 13, "position": 33, "lengths": [17, 2, 1]},
    "long": {"rows": 2, "heads": 2, "head_dim": 32, "position": 300, "lengths": [290, 3]},
    "silu": {"rows": 17, "heads": 2, "head_dim": 64, "position": 4, "lengths": [7] * 4,
             "activation": "silu"},
    "pre-norm": {"rows": 4, "heads": 2, "head_dim": 24, "position": 8, "lengths": [3, 4],
                 "pre_norm": True},
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_is_as_exact_as_pytorch(isa, name, dtype):
    given = to(dtype, draw(inner=40, **CASES[name]))
    exact, ours = to(torch.float64, given), to(dtype, given)

    def plain():
        copied = to(dtype, given)
        return reference.decoder_step(**copied), copied["cache"]

    expected, actual = reference.decoder_step(**exact), ops.decoder_step(**ours)
    yardstick = Yardstick(plain)
    assert_close("rows", actual, expected, yardstick[0])
    assert_close("cache", ours["cache"], exact["cache"], yardstick[1])


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_hypothesis_has_its_bits_in_any_company(isa, dtype):
    """Other hypotheses, and the slots of its own tokens, do not change a hypothesis."""
    given = to(dtype, draw(inner=96, **CASES["wide head"] | {"rows": 19}))
    whole = ops.decoder_step(**to(dtype, given))
    for rows in ([3], [18, 0], list(range(5, 17))):
        part = to(dtype, given)
        part["hidden"] = part["hidden"][rows]
        part["slots"] = part["slots"][rows]
        part["sources"] = part["sources"][rows]
        assert torch.equal(ops.decoder_step(**part), whole[rows])
    moved = to(dtype, given)
    order = torch.randperm(moved["cache"].shape[2])
    moved["cache"] = moved["cache"][:, :, order].contiguous()
    moved["slots"] = order.argsort()[moved["slots"].long()].to(torch.int32)
    assert torch.equal(ops.decoder_step(**moved), whole)


def test_reads_only_its_own_positions(isa):
    """NaN in slots, positions and sources to which no hypothesis attends changes nothing."""
    given = draw(inner=40, **CASES["odd head"])
    given["sources"].fill_(1)
    whole = ops.decoder_step(**to(torch.float32, given))
    spoiled = to(torch.float32, given)
    cache, position = spoiled["cache"], given["position"]
    read = torch.zeros(cache.shape[2], cache.shape[4], dtype=torch.bool)
    read[given["slots"][:, :position].long(), torch.arange(position)] = True
    cache.masked_fill_(~read[:, None, :, None], torch.nan)
    begin, end = given["cu_seqlens"][1:3].tolist()
    spoiled["source_cache"][:, :, :, :begin] = torch.nan
    spoiled["source_cache"][:, :, :, end:] = torch.nan
    assert torch.equal(ops.decoder_step(**spoiled), whole)


def test_stores_the_new_keys_and_values_only(isa):
    given = draw(inner=40, **CASES["odd head"])
    ours = to(torch.float32, given)
    ops.decoder_step(**ours)
    rows, position = given["hidden"].shape[0], given["position"]
    changed = (ours["cache"] != given["cache"]).any(dim=(0, 1, 3, 5))
    expected = torch.zeros_like(changed)
    expected[:rows, position] = True
    assert torch.equal(changed, expected)


def test_no_hypothesis_is_no_row(isa):
    given = draw(inner=40, **CASES["first token"])
    given["hidden"], given["sources"] = given["hidden"][:0], given["sources"][:0]
    assert ops.decoder_step(**given).shape == (0, 16)


BAD = [
    ("hidden", torch.zeros(3, 4, 4), ValueError, "hidden: got shape"),
    ("parameters", [], ValueError, "parameters: got 0 tensors, allowed: 18 for each layer"),
    ("heads", 3, ValueError, "heads: got 3, allowed: a divisor of 16"),
    ("heads", 4, ValueError, r"cache: got shape \[2, 2, 5, 2, 3, 8\]"),
    ("cache", torch.zeros(2, 2, 5, 2, 3, 8, dtype=torch.float16), TypeError, "cache: got"),
    ("cache", torch.zeros(2, 2, 2, 2, 3, 8), ValueError, "hidden: got 3 rows, allowed: at most 2"),
    ("position", 3, ValueError, "position: got 3, allowed: 0 to 2"),
    ("position", -1, ValueError, "position: got -1, allowed: 0 to 2"),
    ("slots", torch.zeros(3, 3), TypeError, "slots: got dtype Float, allowed: Int"),
    ("slots", torch.zeros(2, 3, dtype=torch.int32), ValueError, "slots: got shape"),
    (
        "slots",
        torch.full((3, 3), 5, dtype=torch.int32),
        ValueError,
        "slots: got 5, allowed: 0 to 4",
    ),
    ("source_cache", torch.zeros(2, 2, 2, 6, 9), ValueError, "source_cache: got shape"),
    ("cu_seqlens", torch.tensor([0, 5, 7], dtype=torch.int32), ValueError, "cu_seqlens: got 5 and"),
    ("sources", torch.tensor([0, 1], dtype=torch.int32), ValueError, "sources: got shape"),
    ("sources", torch.tensor([0, 2, 1], dtype=torch.int32), ValueError, "sources: got 2, allowed"),
    ("eps", -1.0, ValueError, "eps: got -1"),
    ("activation", "geglu", ValueError, "activation: got 'geglu', allowed: gelu"),
    ("backend", "cuda", ValueError, "backend: got 'cuda', allowed: None, cpu, reference"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), BAD)
def test_bad_arguments_are_named(name, value, error, message):
    given = draw(inner=40, **CASES["first token"])
    given["position"], given["slots"] = 1, given["slots"].clamp(max=4)
    if name == "sources" or name == "cu_seqlens":
        given["sources"] = torch.tensor([0, 1, 1], dtype=torch.int32)
    kept = given["cache"].clone()
    with pytest.raises(error, match=message):
        ops.decoder_step(**given | {name: value})
    assert torch.equal(given["cache"], kept)


def test_a_gradient_is_refused():
    given = draw(inner=40, **CASES["first token"])
    given["hidden"].requires_grad_()
    with pytest.raises(ValueError, match="hidden, parameters: got a tensor that requires"):
        ops.decoder_step(**given)
    with torch.no_grad():
        ops.decoder_step(**given)
