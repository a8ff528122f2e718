"""The plots of the benchmark sections have the right lines."""

from __future__ import annotations

import pytest

from fastbert.bench.plots import _peers_of, plot_matches
from fastbert.machine import describe


def row(contender: str, rate: float, dtype: str = "bf16", label: str = "A 1×32", **more):
    ours = contender.startswith("fastbert")
    known = {"series": "A", "unit": "tokens/s", "label": label, "dtype": dtype}
    timed = {"rate": rate, "seconds": 1 / rate}
    return known | timed | {"contender": contender, "ours": ours, **more}


ROWS = [
    row("fastbert bf16", 9.0, goal=10.0),
    row("fastbert fp32", 5.0, "fp32"),
    row("first bf16", 7.0),
    row("second bf16", 8.0),
    row("first fp32", 8.5, "fp32"),
    row("second fp32", 4.0, "fp32"),
    row("fastbert int8", 9.5, "int8"),
    row("fastbert bf16", 3.0, label="A 8×128"),
]


@pytest.mark.parametrize(
    ("number", "peers"),
    [
        (0, ["first fp32", "second bf16", "first bf16", "second fp32"]),
        # A bf16 peer is less exact than an fp32 result, so the two are not compared.
        (1, ["first fp32", "second fp32"]),
        (6, ["first fp32", "second bf16", "first bf16", "second fp32"]),
        (7, []),
    ],
)
def test_the_peers_are_at_least_as_exact_and_the_fastest_is_first(number, peers):
    assert [peer["contender"] for peer in _peers_of(ROWS[number], ROWS)] == peers


@pytest.mark.parametrize("rows", [ROWS, ROWS[-1:], []])
def test_a_picture_names_the_best_peer_and_the_ratio(rows, tmp_path):
    plot_matches(tmp_path / "x.svg", rows, describe())
    assert (tmp_path / "x.svg").stat().st_size > 1000
