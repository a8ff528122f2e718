"""`make soak` reports growing resources, and one round of its functions runs."""

from __future__ import annotations

import random

import pytest
import soak
from soak import Usage


def flat(rounds: int, mib: float = 500.0) -> list[Usage]:
    return [Usage(mib + n % 3, 20, 8) for n in range(rounds)]


def test_a_flat_process_passes_and_one_that_grows_at_first():
    assert soak.growth(flat(40)) == []
    assert soak.growth([Usage(100.0 * n, n, n) for n in range(4)] + flat(36)) == []


@pytest.mark.parametrize(
    ("leak", "message"),
    [
        ((1.0, 0, 0), "resident memory grew from 5"),
        ((0.0, 1, 0), "files grew from 3"),
        ((0.0, 0, 1), "threads grew from 2"),
    ],
)
def test_a_leak_is_named(leak, message):
    seen = [Usage(500.0 + leak[0] * n, 20 + leak[1] * n, 8 + leak[2] * n) for n in range(40)]
    [growth] = soak.growth(seen)
    assert growth.startswith(message)


def test_too_few_rounds_prove_nothing():
    with pytest.raises(ValueError, match="minutes: 7 rounds were made, allowed: 8 or more"):
        soak.growth(flat(7))


def test_every_turn_runs_and_the_usage_is_read(tmp_path):
    pytest.importorskip("transformers")
    before = soak.usage()
    names = []
    for name, turn in soak.turns(tmp_path, random.Random(0)):
        turn()
        names.append(name)
    assert names == ["infer", "train", "accelerate_and_restore", "save_and_load"]
    after = soak.usage()
    assert after.mib > 50
    assert before.threads >= 1 <= before.files
