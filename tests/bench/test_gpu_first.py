"""The first contact: its plan, its time limits, its screen, and a rehearsal of the whole."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # benchmarks/ is no part of the package

from benchmarks.gpu.first import __main__ as first  # noqa: E402
from benchmarks.gpu.first import graphs, screen, smoke  # noqa: E402
from benchmarks.gpu.first.plan import LIMIT_S, PROCESSES, RERUNS, Step, steps  # noqa: E402
from benchmarks.gpu.first.run import (  # noqa: E402
    FAILED,
    NOT_RUN,
    OK,
    OUT_OF_TIME,
    Outcome,
    play,
)
from fastbert.ops import backend as backends  # noqa: E402

PYTHON = sys.executable
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def step(name, *codes, limit_s=30, **options):
    return Step(name, "", tuple((PYTHON, "-c", code) for code in codes), limit_s, **options)


def run(plan, folder, limit_s=60.0):
    said: list[str] = []
    return {o.step.name: o for o in play(plan, folder, limit_s, said.append)}


# The plan


def test_the_limits_add_up_to_eight_minutes():
    plan = steps(ROOT)
    assert LIMIT_S == 480
    assert sum(s.limit_s for s in plan if not s.background) <= LIMIT_S - 10


def test_the_order_and_the_commands_of_the_plan():
    plan = {s.name: s for s in steps(ROOT)}
    assert list(plan)[:4] == ["machine", "build", "compile", "smoke"]
    assert {s.after for s in plan.values()} == {"", "build"}
    assert plan["build"].background
    shards = [command[command.index("--shard") + 1] for command in plan["smoke"].commands]
    assert shards == [f"{n}/{PROCESSES}" for n in range(PROCESSES)]
    assert all(str(RERUNS) in command for command in plan["smoke"].commands)
    checked = {command[-1] for command in plan["check-bfloat16"].commands}
    assert {"attention", "linear_cross_entropy", "bert"} < checked


def test_the_rehearsal_has_the_steps_of_the_plan():
    real, rehearsed = steps(ROOT), steps(ROOT, rehearsal=True)
    for one, other in zip(real, rehearsed, strict=True):
        assert (one.name, one.limit_s, one.after) == (other.name, other.limit_s, other.after)


# The run


def test_a_step_that_fails_does_not_stop_the_next(tmp_path):
    bad = "import sys; print('so far'); sys.exit('the reason')"
    found = run([step("one", "print(1)", bad), step("two", "print(2)")], tmp_path)
    assert found["one"].verdict == FAILED
    assert found["one"].statuses == [0, 1]
    assert found["one"].reason == "exit status 1: the reason"
    assert found["one"].outputs == ["1\n", "so far\n"]
    assert found["two"].verdict == OK


def test_a_command_that_is_missing_is_a_failure(tmp_path):
    plan = [Step("one", "", (("no-such-tool", "x"),), 10), step("two", "print(2)")]
    found = run(plan, tmp_path)
    assert found["one"].verdict == FAILED
    assert "no-such-tool" in found["one"].reason
    assert found["two"].verdict == OK


def test_a_step_that_hangs_is_ended_with_its_children(tmp_path):
    child = tmp_path / "child"
    sleep = f"import os, time; open({str(child)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    hangs = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
    start = time.monotonic()
    found = run([step("one", hangs, "print(1)", limit_s=5), step("two", "print(2)")], tmp_path)
    assert time.monotonic() - start < 40
    assert found["one"].verdict == OUT_OF_TIME
    assert found["one"].statuses == [None, 0]
    assert found["two"].verdict == OK
    pid = int(child.read_text(encoding="utf-8"))
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text(encoding="utf-8").split()[2] == "Z"


def test_the_end_of_the_plan_is_said(tmp_path):
    plan = [step("one", "import time; time.sleep(60)"), step("two", "print(2)")]
    found = run(plan, tmp_path, limit_s=2)
    assert found["one"].verdict == OUT_OF_TIME
    assert found["two"].verdict == NOT_RUN
    assert "the 2 s of the plan were over" in found["two"].reason


def test_a_step_waits_for_the_background_and_lets_others_pass(tmp_path):
    log = tmp_path / "log"
    note = f"open({str(log)!r}, 'a').write"
    plan = [
        step("build", f"import time; time.sleep(3); {note}('build ')", background=True),
        step("needs", f"{note}('needs ')", after="build"),
        step("other", f"{note}('other ')"),
    ]
    found = run(plan, tmp_path)
    assert log.read_text(encoding="utf-8").split() == ["other", "build", "needs"]
    assert list(found) == ["build", "needs", "other"]


def test_a_step_after_a_failure_is_not_run(tmp_path):
    plan = [step("build", "raise SystemExit(1)", background=True), step("cuda", "", after="build")]
    found = run(plan, tmp_path)
    assert found["cuda"].verdict == NOT_RUN
    assert found["cuda"].reason == "build: FAILED"


# The smoke


def options(**changes):
    values = {
        "backend": "cpu", "dtype": "bfloat16", "op": "layer_norm", "quick": True, "reruns": 3,
        "shard": "0/1", "first": 0, "emulate": None,
    }  # fmt: skip
    return argparse.Namespace(**{**values, **changes})


def said(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.skipif(backends.EXTENSION is None, reason="needs the extension")
def test_the_smoke_runs_each_case_of_its_shard_once(capsys):
    names = []
    for shard in ("0/2", "1/2"):
        assert smoke.run(options(shard=shard)) == 0
        names += [r["case"] for r in said(capsys) if r["smoke"] == "done"]
    assert sorted(names) == sorted(case.name for case in smoke.selected(options(), "cpu"))
    assert len(names) > 1


def test_other_bits_in_a_rerun_are_a_fault(monkeypatch, capsys):
    calls = []

    def wavering(function, inputs, extra):
        calls.append(1)
        return {"out": torch.ones(3), "dx": torch.full((3,), 1.0 + (len(calls) == 3))}

    monkeypatch.setattr(smoke.parity, "run_with_gradients", wavering)
    assert smoke.run(options(backend="reference", shard="0/100")) == 1
    [_, done] = said(capsys)
    assert done["faults"] == ["rerun 2 has other bits in dx"]


def test_a_result_that_is_not_finite_is_a_fault(monkeypatch, capsys):
    broken = {"out": torch.tensor([1.0, float("nan")])}
    monkeypatch.setattr(smoke.parity, "run_with_gradients", lambda *args: broken)
    assert smoke.run(options(backend="reference", shard="0/100", reruns=0)) == 1
    assert said(capsys)[-1]["faults"] == ["out is not finite"]


HANG = """
import sys, time
from benchmarks.gpu.first import smoke
honest = smoke.smoke
def hang(case, options, device):
    if options.first == 0:
        time.sleep(60)
    return honest(case, options, device)
smoke.CASE_LIMIT_S, smoke.smoke = 1.0, hang
sys.exit(smoke.main())
"""


def test_a_case_that_hangs_is_given_up_and_the_next_case_runs():
    command = [PYTHON, "-c", HANG, "--backend", "reference", "--op", "layer_norm", "--quick"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, "--reruns", "1"], env=environment, cwd=ROOT, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    done = [r for r in map(json.loads, result.stdout.splitlines()) if r["smoke"] == "done"]
    assert done[0]["faults"] == ["the process was given up: 1.0 s"]
    assert len(done) > 1
    assert not any(r["faults"] for r in done[1:])


# The screen


def outcome(name, output, verdict=OK, error=""):
    made = step(name, "")
    return Outcome(made, verdict, statuses=[0], outputs=[output], errors=[error])


def line(state, case, faults=(), kernels=("a",)):
    launched = dict.fromkeys(kernels, 1)
    record = {"smoke": state, "op": "rotary", "case": case, "faults": list(faults)}
    return json.dumps({**record, "kernels": launched}) + "\n"


def test_the_screen_names_the_case_that_never_ended(tmp_path):
    text = line("started", "one") + line("done", "one") + line("started", "two")
    found = outcome("smoke", text, OUT_OF_TIME)
    shown = screen.screen([found], tmp_path, ["b"])
    assert "1 of 1 cases, 1 kernels" in shown[0]
    assert "rotary two: never ended" in shown[1]
    assert shown[-1] == "no case launched: b"


def test_a_fault_in_a_line_fails_the_step(tmp_path):
    found = outcome("smoke", line("done", "one", ["out is not finite"]))
    shown = screen.screen([found], tmp_path, [])
    assert found.verdict == FAILED
    assert "rotary one: out is not finite" in shown[1]


@pytest.mark.parametrize("name", ["smoke", "smoke-cuda", "sanitizer", "check-float32", "graphs"])
def test_a_step_that_did_nothing_is_no_success(tmp_path, name):
    found = outcome(name, "")
    found.step = Step(name, "", (("compute-sanitizer", "--tool", "memcheck"),), 10)
    screen.screen([found], tmp_path, [])
    assert found.verdict == FAILED


def test_graphs_that_compute_something_else_are_a_fault(monkeypatch, capsys, tmp_path):
    """A recording that repeats the first result is found in inference and in training."""

    def once(recording):
        if recording.result is None:
            recording.result = recording.function()

    monkeypatch.setattr(graphs.Latest, "replay", once)
    monkeypatch.setattr(sys, "argv", ["graphs", "--rehearse"])
    assert graphs.main() == 1
    found = outcome("graphs", capsys.readouterr().out)
    shown = screen.screen([found], tmp_path, [])
    assert "0 of 3 comparisons agree" in shown[0]
    assert "inference: packed (90, 80, 20): largest difference" in shown[1]
    assert "replays draw the same dropout masks" in " ".join(screen.graph_lines(found))


def test_the_screen_begins_with_the_machine(tmp_path):
    info = "versions\n torch    2.11.0 \n triton   3.6.0\n gpu   NVIDIA H200\n torch   2.11 \n"
    shown = screen.screen([outcome("machine", info)], tmp_path, [])
    assert "torch 2.11.0, triton 3.6.0, gpu NVIDIA H200" in shown[0]


def test_kernels_that_no_case_launched():
    found = outcome("smoke", line("done", "one", kernels=("a", "b")))
    assert screen.never_launched([found], ["a", "b", "c"]) == ["c"]


def test_at_most_eight_files(tmp_path):
    found = [outcome("smoke", line("done", "one")), outcome("machine", "x" * 100_000)]
    screen.write(found, tmp_path, ["text"])
    assert {p.name for p in tmp_path.iterdir()} == {
        "summary.json", "check.json", "smoke.json", "first.log",
    }  # fmt: skip
    # The attention step adds a JSON file and a plot.
    assert len(list(tmp_path.iterdir())) + 2 <= 8
    assert (tmp_path / "first.log").stat().st_size < 50_000


# The whole


@no_gpu
def test_without_a_gpu_nothing_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["first", "--out", str(tmp_path / "first")])
    assert first.main() == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "first").exists()


SANITIZER = """#!/bin/sh
# Stands in for the tool: leaves out its options and runs the program.
while true; do case "$1" in --*) shift 2;; *) break;; esac; done
"$@"
status=$?
echo "========= ERROR SUMMARY: 0 errors"
exit $status
"""


@no_gpu
@pytest.mark.skipif(not backends.HAS_TRITON, reason="needs triton")
@pytest.mark.skipif(backends.EXTENSION is None, reason="needs the extension")
@pytest.mark.timeout(1500)
def test_the_rehearsal_of_the_whole_plan(tmp_path):
    """Every step runs: the compiled Triton kernels on the PTX machine, all else on the CPU."""
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    environment["PATH"] = f"{tool.parent}{os.pathsep}{environment['PATH']}"
    environment["TRITON_INTERPRET"] = "0"
    command = [PYTHON, "-m", "benchmarks.gpu.first", "--rehearse", "--out", str(tmp_path / "out")]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1400
    )
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads((tmp_path / "out" / "summary.json").read_text("utf-8"))
    assert [s["verdict"] for s in content["steps"]] == [OK] * len(steps(ROOT))
    assert result.stdout.rstrip().endswith("\n".join(content["screen"][-3:]).rstrip())
    assert len(content["screen"]) < 50
    smoked = json.loads((tmp_path / "out" / "smoke.json").read_text("utf-8"))["smoke"]
    launched = {kernel for record in smoked for kernel in record.get("kernels", ())}
    assert launched == {"layer_norm_forward", "layer_norm_backward", "sum_partials"}
    assert len(list((tmp_path / "out").iterdir())) <= 8
