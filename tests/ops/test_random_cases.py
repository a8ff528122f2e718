"""Random cases by seed are right: hundreds on Triton kernels, and fewer on the other backends.

`make test` runs the first round of Triton's cases in fp32, and `make every-case` runs all rounds.

A failure prints the command that reproduces the case. More cases run with ``fastbert check
--cases 5000 --backend triton``.
"""

from __future__ import annotations

import pytest
import torch
from quick_cases import long_case

from fastbert.testing import parity
from fastbert.testing.cases import OPS
from fastbert.testing.random_cases import (
    FEWEST_LOGITS,
    GENERATORS,
    TURNS,
    free_logits,
    random_case,
    random_cases,
)
from fastbert.testing.selection import find

DEVICE = parity.devices()[0]
# The number of rounds by dtype; each round has a case of every operation.
ROUNDS = {torch.float32: 21, torch.float16: 21, torch.bfloat16: 12}


def served(backend: str, dtype: torch.dtype, rounds: int):
    """Yield the random cases that the backend supports on this machine, one group per round."""
    for turn in range(rounds):
        cases = random_cases(len(TURNS) * rounds)[turn * len(TURNS) :][: len(TURNS)]
        group = [c for c in cases if parity.refusal(c, backend, dtype, DEVICE) is None]
        if group:
            # A round takes seconds in Triton's interpreter.
            slow = backend == "triton" and (turn > 0 or dtype != torch.float32)
            name = f"{backend}-{str(dtype)[6:]}-{turn}"
            yield (long_case if slow else pytest.param)(group, backend, dtype, id=name)


TRITON = [group for dtype, rounds in ROUNDS.items() for group in served("triton", dtype, rounds)]
OTHERS = [
    group
    for backend in ("reference", "cuda", "cpu")
    for dtype in ROUNDS
    for group in served(backend, dtype, 2)
]


@pytest.mark.parametrize(("cases", "backend", "dtype"), TRITON + OTHERS)
def test_random_cases(cases, backend, dtype):
    failures = []
    for case in cases:
        try:
            failed = [
                str(r) for r in parity.check_case(case, backend, dtype, DEVICE) if not r.passed
            ]
        except Exception as error:
            failed = [f"{type(error).__name__}: {error}"]
        if failed:
            failures.append("\n  ".join([case.command(backend, dtype), *failed]))
    assert not failures, "\n" + "\n".join(failures)


@pytest.mark.skipif(not TRITON, reason="needs triton")
def test_there_are_enough_of_them():
    assert sum(len(group.values[0]) for group in TRITON) >= 600


def test_every_operation_has_a_generator():
    assert set(GENERATORS) == set(OPS) == set(TURNS)


@pytest.mark.parametrize("op", OPS)
def test_a_name_is_enough_to_reproduce_a_case(op):
    case = random_case(op, 17, seed=3)
    assert find(op, "random-3-17") == [case]
    assert "--case random-3-17" in case.command("triton", torch.float16)
    assert case != random_case(op, 18, seed=3)
    assert case.shape != random_case(op, 17).shape or case.options != random_case(op, 17).options
    first, again = (case.inputs(torch.float32) for _ in range(2))
    for name in first.gradients:
        assert torch.equal(dict(first.items())[name], dict(again.items())[name])


def test_a_random_case_needs_its_operation_and_a_number():
    with pytest.raises(ValueError, match="op: got None"):
        find(None, "random-0-1")
    with pytest.raises(ValueError, match="random-SEED-INDEX"):
        find("layer_norm", "random-seventeen")


def test_the_options_are_all_met_among_a_thousand_cases():
    """A thousand random cases contain every option, so that every kernel is tested."""
    cases = random_cases(1000)
    dense = [c for c in cases if c.op == "attention"]
    assert {c.options.get("mask") for c in dense} >= {None, "padding", "rows", "k", "bhqk"}
    assert {c.options["layout"] for c in dense} == {"sliced", "transposed", "expanded", "offset"}
    assert any(c.options.get("bias_gradient") for c in dense)
    assert any(c.options.get("scale", 1.0) < 0 for c in dense)
    assert any(c.shape[2] != c.shape[3] and c.options.get("causal") for c in dense)
    assert any(c.shape[2] == 0 or c.shape[3] == 0 for c in dense)
    assert {c.shape[4] for c in dense} >= {1, 16, 59, 64, 128}
    assert max(c.shape[4] for c in dense) > 128
    packed = [c for c in cases if c.op == "attention_varlen"]
    assert any(0 in c.shape[0] for c in packed)
    assert any("key_lengths" in c.options for c in packed)
    assert any(c.shape[3] > 0 for c in packed)
    assert {c.gpu_tiles for c in cases} == {False, True}


@pytest.mark.parametrize("op", ["linear_gelu", "feed_forward"])
def test_half_of_the_products_with_an_activation_meet_the_cuda_kernels(op):
    cases = random_cases(400, op=op)
    fused = [c for c in cases if all(size % 8 == 0 for size in c.shape[1:])]
    assert 0.5 * len(cases) <= len(fused) <= 0.8 * len(cases)
    # The number of rows is arbitrary, and some cases have sizes that the fused kernels do not
    # support.
    assert {c.shape[0] % 8 for c in fused} == set(range(8))
    assert {size % 8 for c in cases for size in c.shape[1:]} == set(range(8))


def test_free_logits():
    assert free_logits(3, 4) == 9
    # The three rows attend to 2, 3 and 4 keys. One logit of each row is not free, because the
    # weights sum to 1. A window of 0 leaves one key, so no logit is free.
    assert free_logits(3, 4, causal=True) == 1 + 2 + 3
    assert free_logits(3, 4, window=0) == 0
    assert free_logits(5, 2, causal=True) == 1
    assert FEWEST_LOGITS >= 64
