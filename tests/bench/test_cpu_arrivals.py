"""Calls at random times in the CPU benchmark: the rules on invented times, and a tiny run."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for imports from benchmarks/

from benchmarks.cpu import __main__ as cpu
from benchmarks.cpu import arrivals, runtimes, worker
from benchmarks.cpu.ceilings import Ceilings
from benchmarks.cpu.contest import LEFT_OUT, Setting
from benchmarks.cpu.remote import Failed
from fastbert.bench.contest import to_dict
from fastbert.bench.timing import percentile

OURS = "fastbert fp32"


def setting(unit: str = "widened to fp32") -> Setting:
    units = {"fp32": "FMA", "bf16": unit, "int8": "pairs"}
    rates = {"fp32": 2e11, "bf16": 2e11, "int8": 3e11}
    ceilings = Ceilings(2, rates, units, 2e10, 1.3e11, 2e10)
    return Setting("arrivals", 0.0, lambda text: None, ceilings=ceilings)


def test_percentiles():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile(range(1, 201), 0.99) == 198
    assert percentile([1.0], 0.0) == 1.0


def test_the_gaps_are_those_of_a_poisson_process():
    for column in arrivals.COLUMNS:
        gaps = column.gaps(2000)
        assert gaps == column.gaps(2000)
        if column.rate is None:
            assert set(gaps) == {0.0}
        else:
            assert np.mean(gaps) == pytest.approx(1 / column.rate, rel=0.1)
            assert np.std(gaps) == pytest.approx(1 / column.rate, rel=0.1)


def test_a_worker_sleeps_between_the_calls(tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    server, starts = worker.Server(OURS, tmp_path, 1), []
    server.call = lambda index: starts.append(time.perf_counter()) or time.sleep(0.02)
    begin = time.perf_counter()
    times = server.arrivals([0.05, 0.05, 0.0, 0.0])["times"]
    assert len(times) == 4
    assert min(times) >= 0.02
    assert starts[1] - begin >= 0.1  # The second call is due 0.1 s after the start.
    assert starts[1] - starts[0] >= 0.02


def test_the_busy_process_ends_in_every_case():
    def is_running(process: int) -> bool:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        return True

    processes = []

    def fail() -> None:
        with arrivals.busy_process() as process:
            processes.append(process)
            assert is_running(process)
            raise Failed("no answer")

    with pytest.raises(Failed):
        fail()
    assert not is_running(processes[0])


def test_formats_without_a_unit_are_left_out_of_arrivals():
    bf16, fp32 = (runtimes.BY_NAME[f"OpenVINO {form}"] for form in ("bf16", "fp32"))
    assert arrivals.left_out(bf16, setting()).startswith(LEFT_OUT)
    assert arrivals.left_out(fp32, setting()) is None
    assert arrivals.left_out(bf16, setting("AVX512-BF16")) is None


def test_arrivals_have_a_row_for_each_column_and_goals(monkeypatch):
    class Served:
        """A worker whose calls take 1 ms, or twice as long at 5 calls per second."""

        def __init__(self, engine: str, folder: Path, threads: int) -> None:
            self.engine = engine

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def ask(self, do: str, **given) -> dict:
            if self.engine == "OpenVINO int8":
                raise Failed("no such model")
            slow = given.get("gaps") and given["gaps"][0] > 0.1
            times = [2e-3 if slow else 1e-3] * len(given.get("gaps", ()))
            return {"times": times, "refused": None, "note": None}

    monkeypatch.setattr(arrivals, "Remote", Served)
    monkeypatch.setattr(
        arrivals, "prepare", lambda *_: {"fastbert bf16": f"{LEFT_OUT}no unit for bf16"}
    )
    names = ("fastbert bf16", "fastbert fp32", "OpenVINO int8")
    rows = arrivals.run(setting(), 1, names)
    assert [row.label for row in rows if row.contender == OURS] == [
        column.label for column in arrivals.COLUMNS
    ]
    assert [row.refused for row in rows if row.contender != OURS] == [
        f"{LEFT_OUT}no unit for bf16",
        "no such model",
    ]
    assert not any(map(cpu.is_fault, rows))
    lines = list(arrivals.lines([to_dict(row) for row in rows]))
    (cells,) = (text for text in lines if text.startswith("| fastbert fp32"))
    assert cells.startswith("| fastbert fp32 | 1.00 / 1.00 | 2.00 / 2.00 (2.00 ×) |")
    assert "- fastbert fp32: **not met**: p50 at 5 per second is 2.00 × steady" in lines
    assert "- OpenVINO int8: no such model" in lines


def test_goals_are_for_random_arrivals_on_an_idle_machine():
    found = {
        column.label: {"seconds": 1e-3 * (5 if column.busy else 1.3), "p99": 3e-3}
        for column in arrivals.COLUMNS
    }
    assert arrivals.missed(found) == []
    found["100 per second"]["p99"] = 12e-3
    assert arrivals.missed(found) == ["**not met**: p99 at 100 per second is 4.00 × steady"]


@pytest.mark.every_case
def test_arrivals_leave_a_table(tmp_path):
    said: list[str] = []
    assert cpu.run(["arrivals"], tmp_path, 1, (OURS,), quick=True, notify=said.append) == 0, said
    page = (tmp_path / "arrivals.md").read_text("utf-8")
    assert page.startswith("# arrivals")
    assert "| fastbert fp32 | " in page
