"""The first run on a GPU has the right plan, limits and output, and its rehearsal passes."""

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
sys.path.append(str(ROOT))  # for imports from benchmarks/

from benchmarks.gpu.contest import GpuRow  # noqa: E402
from benchmarks.gpu.first import __main__ as first  # noqa: E402
from benchmarks.gpu.first import canary, faults, graphs, screen, smoke, watch  # noqa: E402
from benchmarks.gpu.first.plan import (  # noqa: E402
    LIMIT_S,
    PATIENCE,
    PROCESSES,
    REHEARSED_CASE_LIMIT_S,
    RERUNS,
    Step,
    steps,
)
from benchmarks.gpu.first.run import (  # noqa: E402
    FAILED,
    NOT_RUN,
    OK,
    OUT_OF_TIME,
    Outcome,
    play,
)
from fastbert.bench.contest import to_dict  # noqa: E402
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
    assert {s.after for s in plan.values()} == {"", "build", "canary"}
    assert plan["build"].background
    shards = [command[command.index("--shard") + 1] for command in plan["smoke"].commands]
    assert shards == [f"{n}/{PROCESSES}" for n in range(PROCESSES)]
    assert all(str(RERUNS) in command for command in plan["smoke"].commands)
    checked = {command[-1] for command in plan["check-bfloat16"].commands}
    assert {"attention", "linear_cross_entropy", "bert"} < checked


def option(command, name, default=None):
    return command[command.index(name) + 1] if name in command else default


def test_triton_comes_before_cuda():
    """All Triton steps come before the step "canary", and all CUDA C++ steps come after it."""
    names = [s.name for s in steps(ROOT)]
    guarded = [s.name for s in steps(ROOT) if s.families]
    assert guarded == names[names.index("canary") :]
    for one in steps(ROOT):
        for command in one.commands:
            backend = option(command, "--backend")
            if one.families:
                assert backend in ("cuda", None), command
                assert "first-attention" not in command
            else:
                assert backend in ("triton", None), command
                # Without --backend, a check would also run CUDA C++.
                assert backend or "check" not in command, command
        assert len(one.families) in (0, len(one.commands))
        assert one.after == ("canary" if one.families and one.name != "canary" else one.after)


@pytest.mark.parametrize("rehearsal", [False, True])
def test_the_limit_of_a_case_is_below_that_of_its_step(rehearsal):
    smokes = [
        (one, command)
        for one in steps(ROOT, rehearsal=rehearsal)
        for command in one.commands
        if "benchmarks.gpu.first.smoke" in command
    ]
    assert {one.name for one, _ in smokes} == {"smoke", "smoke-cuda", "sanitizer", "sanitizer-cuda"}
    for one, command in smokes:
        assert float(option(command, "--limit", smoke.CASE_LIMIT_S)) < one.limit_s, one.name
    assert smoke.CASE_LIMIT_S == 8
    canaries = next(one for one in steps(ROOT, rehearsal=rehearsal) if one.name == "canary")
    assert canary.LIMIT_S == 5 < canaries.limit_s
    assert canaries.families == canary.FAMILIES
    assert set(canary.FAMILIES) == {"attention", "layer_norm", "linear_gelu", "feed_forward"}


def test_the_minutes_of_a_benchmark_are_below_the_limit_of_its_step():
    for one in steps(ROOT):
        for command in one.commands:
            if "--minutes" in command:
                assert 60 * float(option(command, "--minutes")) < one.limit_s


def test_the_rehearsal_has_the_steps_of_the_plan():
    real, rehearsed = steps(ROOT), steps(ROOT, rehearsal=True)
    for one, other in zip(real, rehearsed, strict=True):
        assert (one.name, one.after) == (other.name, other.after)
        assert PATIENCE * one.limit_s == other.limit_s


# The run


def test_a_step_that_fails_does_not_stop_the_next(tmp_path):
    bad = "import sys; print('so far'); sys.exit('the reason')"
    outcomes = run([step("one", "print(1)", bad), step("two", "print(2)")], tmp_path)
    assert outcomes["one"].result == FAILED
    assert outcomes["one"].statuses == [0, 1]
    assert outcomes["one"].reason == "exit status 1: the reason"
    assert outcomes["one"].outputs == ["1\n", "so far\n"]
    assert outcomes["two"].result == OK


def test_a_command_that_is_missing_is_a_failure(tmp_path):
    plan = [Step("one", "", (("no-such-tool", "x"),), 10), step("two", "print(2)")]
    outcomes = run(plan, tmp_path)
    assert outcomes["one"].result == FAILED
    assert "no-such-tool" in outcomes["one"].reason
    assert outcomes["two"].result == OK


def test_a_step_that_hangs_is_ended_with_its_children(tmp_path):
    child = tmp_path / "child"
    sleep = f"import os, time; open({str(child)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    hangs = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
    start = time.monotonic()
    outcomes = run([step("one", hangs, "print(1)", limit_s=5), step("two", "print(2)")], tmp_path)
    assert time.monotonic() - start < 40
    assert outcomes["one"].result == OUT_OF_TIME
    assert outcomes["one"].statuses == [None, 0]
    assert outcomes["two"].result == OK
    pid = int(child.read_text(encoding="utf-8"))
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text(encoding="utf-8").split()[2] == "Z"


def test_the_end_of_the_plan_is_said(tmp_path):
    plan = [step("one", "import time; time.sleep(60)"), step("two", "print(2)")]
    outcomes = run(plan, tmp_path, limit_s=2)
    assert outcomes["one"].result == OUT_OF_TIME
    assert outcomes["two"].result == NOT_RUN
    assert "the 2 s of the plan were over" in outcomes["two"].reason


def test_a_step_waits_for_the_background_and_lets_others_pass(tmp_path):
    log = tmp_path / "log"
    note = f"open({str(log)!r}, 'a').write"
    plan = [
        step("build", f"import time; time.sleep(1); {note}('build ')", background=True),
        step("needs", f"{note}('needs ')", after="build"),
        step("other", f"{note}('other ')"),
    ]
    outcomes = run(plan, tmp_path)
    assert log.read_text(encoding="utf-8").split() == ["other", "build", "needs"]
    assert list(outcomes) == ["build", "needs", "other"]


def test_a_step_after_a_failure_is_not_run(tmp_path):
    plan = [step("build", "raise SystemExit(1)", background=True), step("cuda", "", after="build")]
    outcomes = run(plan, tmp_path)
    assert outcomes["cuda"].result == NOT_RUN
    assert outcomes["cuda"].reason == "build: FAILED"


def test_a_row_is_handed_on_before_its_command_ends(tmp_path):
    """A row is reported while its command still runs, so that a hang does not lose the row."""
    kept, seen = tmp_path / "kept", []
    waits = (
        "import json, pathlib, time\n"
        "print(json.dumps({'row': 1}), flush=True)\n"
        f"while not pathlib.Path({str(kept)!r}).exists(): time.sleep(0.01)\n"
        "print('no row'); print(json.dumps({'row': 2}), end='')"
    )

    def keep(step, row):
        seen.append((step.name, row))
        kept.touch()

    play([step("one", waits)], tmp_path, 60.0, lambda text: None, keep)
    assert [row.get("row") for _, row in seen] == [1, 2, None]
    assert seen[-1][1]["result"] == OK


@pytest.mark.every_case
def test_the_rows_of_a_hang_are_in_the_file(tmp_path):
    hangs = "import time; print('{\"row\": 1}', flush=True); time.sleep(60)"
    rows = screen.Rows(tmp_path)
    play([step("one", hangs, limit_s=5)], tmp_path, 60.0, lambda text: None, rows.add)
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert written[0] == {"step": "one", "row": 1}
    assert (written[1]["step"], written[1]["result"]) == ("one", OUT_OF_TIME)


def test_a_family_whose_canary_hangs_is_skipped(tmp_path):
    """Later steps skip a family whose canary hangs, and run a family whose canary only fails."""
    log = tmp_path / "log"
    families = ("a", "b", "c")
    codes = [f"raise SystemExit({status})" for status in (canary.HUNG, 1, 0)]
    notes = [f"open({str(log)!r}, 'a').write({family!r})" for family in families]
    plan = [
        step("canary", *codes, families=families),
        step("smoke-cuda", *notes, families=families, after="canary"),
        step("attention-cuda", notes[0], families=("a",), after="canary"),
    ]
    outcomes = run(plan, tmp_path)
    assert outcomes["canary"].result == FAILED
    assert sorted(log.read_text()) == ["b", "c"]
    assert outcomes["smoke-cuda"].result == OK
    assert outcomes["smoke-cuda"].skipped == {"a": "its canary hangs"}
    assert outcomes["attention-cuda"].result == NOT_RUN
    shown = screen.screen(list(outcomes.values()), [])
    assert sum("skipped a: its canary hangs" in text for text in shown) == 2


@pytest.mark.every_case
def test_a_canary_that_never_ends_skips_its_family(tmp_path):
    sleep = "import time; time.sleep(60)"
    plan = [
        step("canary", sleep, "", families=("a", "b"), limit_s=4),
        step("smoke-cuda", "", "", families=("a", "b"), after="canary"),
    ]
    outcomes = run(plan, tmp_path)
    assert outcomes["canary"].statuses == [None, 0]
    assert outcomes["smoke-cuda"].skipped == {"a": "its canary hangs"}
    assert len(outcomes["smoke-cuda"].statuses) == 1


def test_without_a_build_there_is_no_canary_and_no_step_after_it(tmp_path):
    plan = [
        step("build", "raise SystemExit(1)", background=True),
        step("canary", "", families=("a",), after="build"),
        step("smoke-cuda", "", families=("a",), after="canary"),
    ]
    outcomes = run(plan, tmp_path)
    assert [outcomes[name].result for name in ("canary", "smoke-cuda")] == [NOT_RUN, NOT_RUN]
    assert outcomes["smoke-cuda"].reason == "canary: NOT RUN"


# Tests of the time limit of a case


def test_compilations_do_not_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watch, "now", lambda: now[0])
    clock = watch.Clock()

    def spend(seconds):
        now[0] += seconds
        return clock.seconds()

    def compiled():
        assert spend(100) == 1
        # The time of a compilation inside another compilation counts once.
        assert clock.paused(spend)(10) == 1
        return "kernel"

    assert spend(1) == 1
    assert clock.paused(compiled)() == "kernel"
    assert clock.seconds() == 1
    assert spend(2) == 3


@pytest.mark.skipif(not backends.HAS_TRITON, reason="needs triton")
def test_the_clock_stands_still_in_tritons_compiler(monkeypatch):
    from triton.runtime.jit import JITFunction

    now, seen = [0.0], []
    monkeypatch.setattr(watch, "now", lambda: now[0])

    def compiles(*arguments):
        now[0] += 100
        seen.append(arguments)

    monkeypatch.setattr(JITFunction, "_do_compile", compiles)
    with watch.limited(8.0, pytest.fail) as clock:
        JITFunction._do_compile("kernel")
        assert clock.seconds() == 0
    assert seen == [("kernel",)]
    assert JITFunction._do_compile is compiles


# The canary


def run_canary(monkeypatch, capsys, family, fault=None):
    if fault is not None:
        monkeypatch.setitem(faults.FAULTS, family, fault)
        monkeypatch.setattr(backends, "TABLES", {k: dict(v) for k, v in backends.TABLES.items()})
        faults.install()
    given = argparse.Namespace(family=family, backend="cpu", dtype="bfloat16", limit=60.0)
    status = canary.run(given)
    return status, said(capsys)


@pytest.mark.skipif(backends.EXTENSION is None, reason="needs the extension")
@pytest.mark.parametrize("family", canary.FAMILIES)
def test_a_canary_runs_a_case_of_its_family(monkeypatch, capsys, family):
    status, (started, done) = run_canary(monkeypatch, capsys, family)
    assert status == 0
    assert (started["result"], done["result"]) == ("started", canary.OK)
    assert (done["canary"], done["op"]) == (family, family)


@pytest.mark.skipif(backends.EXTENSION is None, reason="needs the extension")
def test_a_canary_whose_launch_is_refused_fails(monkeypatch, capsys):
    def refuse(x, result):
        raise RuntimeError(faults.REFUSAL)

    status, rows = run_canary(monkeypatch, capsys, "layer_norm", refuse)
    assert status == 1
    assert rows[-1]["result"] == canary.FAILED
    assert rows[-1]["faults"] == ["RuntimeError: CUDA error: invalid argument"]


# The smoke


def options(**changes):
    values = {
        "backend": "cpu", "dtype": "bfloat16", "op": "layer_norm", "family": None, "quick": True,
        "reruns": 3, "shard": "0/1", "first": 0, "emulate": None, "limit": 600.0,
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
if "--first" in sys.argv:
    sys.argv += ["--limit", "600"]
smoke.smoke = hang
sys.exit(smoke.main())
"""


def test_a_case_that_hangs_is_given_up_and_the_next_case_runs():
    command = [PYTHON, "-c", HANG, "--backend", "reference", "--op", "layer_norm", "--quick"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, "--reruns", "1", "--limit", "1"], env=environment, cwd=ROOT,
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    done = [r for r in map(json.loads, result.stdout.splitlines()) if r["smoke"] == "done"]
    assert done[0]["faults"] == ["the process was given up: 1.0 s"]
    assert len(done) > 1
    assert not any(r["faults"] for r in done[1:])


# The screen


def outcome(name, output, result=OK, error=""):
    made = step(name, "")
    return Outcome(made, result, statuses=[0], outputs=[output], errors=[error])


def line(state, case, faults=(), kernels=("a",)):
    launched = dict.fromkeys(kernels, 1)
    record = {"smoke": state, "op": "rotary", "case": case, "faults": list(faults)}
    return json.dumps({**record, "kernels": launched}) + "\n"


def test_the_screen_names_the_case_that_never_ended(tmp_path):
    text = line("started", "one") + line("done", "one") + line("started", "two")
    smoke = outcome("smoke", text, OUT_OF_TIME)
    shown = screen.screen([smoke], ["b"])
    assert "1 of 1 cases, 1 kernels" in shown[0]
    assert "rotary two: never ended" in shown[1]
    assert shown[-1] == "no case launched: b"


def test_a_fault_in_a_line_fails_the_step(tmp_path):
    result = outcome("smoke", line("done", "one", ["out is not finite"]))
    shown = screen.screen([result], [])
    assert result.result == FAILED
    assert "rotary one: out is not finite" in shown[1]


@pytest.mark.parametrize("name", ["smoke", "smoke-cuda", "sanitizer", "check-float32", "graphs"])
def test_a_step_that_did_nothing_is_no_success(tmp_path, name):
    result = outcome(name, "")
    result.step = Step(name, "", (("compute-sanitizer", "--tool", "memcheck"),), 10)
    screen.screen([result], [])
    assert result.result == FAILED


def test_graphs_that_compute_something_else_are_a_fault(monkeypatch, capsys, tmp_path):
    """A graph that only repeats its first result is reported, in inference and in training."""

    def once(recording):
        if recording.result is None:
            recording.result = recording.function()

    monkeypatch.setattr(graphs.Latest, "replay", once)
    monkeypatch.setattr(sys, "argv", ["graphs", "--rehearse"])
    assert graphs.main() == 1
    result = outcome("graphs", capsys.readouterr().out)
    shown = screen.screen([result], [])
    assert "0 of 3 comparisons agree" in shown[0]
    assert "inference: packed (90, 80, 20): largest difference" in shown[1]
    assert "replays draw the same dropout masks" in " ".join(screen.graph_lines(result))


def test_the_screen_begins_with_the_machine(tmp_path):
    info = "versions\n torch    2.11.0 \n triton   3.6.0\n gpu   NVIDIA H200\n torch   2.11 \n"
    shown = screen.screen([outcome("machine", info)], [])
    assert "torch 2.11.0, triton 3.6.0, gpu NVIDIA H200" in shown[0]


def test_kernels_that_no_case_launched():
    result = outcome("smoke", line("done", "one", kernels=("a", "b")))
    assert screen.never_launched([result], ["a", "b", "c"]) == ["c"]


def test_a_benchmark_that_was_ended_shows_the_matches_before(tmp_path):
    row = GpuRow(
        "first-attention", "attention D64 forward", "S512", "attention", "bfloat16", "forward",
        "fastbert triton*", True, seconds=1e-4,
    )  # fmt: skip
    text = f"ceilings\n{json.dumps(to_dict(row))}\n"
    shown = screen.screen([outcome("attention", text, OUT_OF_TIME)], [])
    assert "attention D64 forward" in shown[0]
    assert "S512" in shown[0]


def test_at_most_eight_files(tmp_path):
    outcomes = [outcome("smoke", line("done", "one")), outcome("machine", "x" * 100_000)]
    rows = screen.Rows(tmp_path)
    rows.add(outcomes[0].step, {"smoke": "done"})
    screen.write(outcomes, tmp_path, ["text"])
    assert {p.name for p in tmp_path.iterdir()} == {"summary.json", "rows.jsonl", "first.log"}
    # The two attention steps would add a JSON file and a plot each.
    assert len(list(tmp_path.iterdir())) + 4 <= 8
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


def rehearse(folder, *words):
    """Rehearse the plan in a new process; return the process, and results and rows by step."""
    tool = folder / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    environment["PATH"] = f"{tool.parent}{os.pathsep}{environment['PATH']}"
    environment["TRITON_INTERPRET"] = "0"
    command = [PYTHON, "-m", "benchmarks.gpu.first", "--rehearse", *words]
    result = subprocess.run(
        [*command, "--out", str(folder / "out")], cwd=ROOT, env=environment, capture_output=True,
        text=True, timeout=1400,
    )  # fmt: skip
    content = json.loads((folder / "out" / "summary.json").read_text("utf-8"))
    lines = (folder / "out" / "rows.jsonl").read_text("utf-8").splitlines()
    rows: dict[str, list[dict]] = {}
    for row in map(json.loads, lines):
        rows.setdefault(row["step"], []).append(row)
    assert result.stdout.rstrip().endswith("\n".join(content["screen"][-3:]).rstrip())
    assert len(content["screen"]) < 60
    assert len(list((folder / "out").iterdir())) <= 8
    return result, {s["step"]: s["result"] for s in content["steps"]}, rows


needs_everything = [
    no_gpu,
    pytest.mark.skipif(not backends.HAS_TRITON, reason="needs triton"),
    pytest.mark.skipif(backends.EXTENSION is None, reason="needs the extension"),
    pytest.mark.timeout(1500),
]


def marked(function):
    for mark in needs_everything:
        function = mark(function)
    return function


@pytest.mark.every_case
@marked
def test_the_rehearsal_of_the_whole_plan(tmp_path):
    """Every step passes, with Triton kernels on the PTX machine and everything else on the CPU."""
    result, results, rows = rehearse(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert results == dict.fromkeys((s.name for s in steps(ROOT)), OK)
    launched = {kernel for row in rows["smoke"] for kernel in row.get("kernels", ())}
    assert launched == {"layer_norm_forward", "layer_norm_backward", "sum_partials"}


@marked
@pytest.mark.every_case
def test_a_rehearsal_with_faults_has_a_row_of_each_and_all_other_rows(tmp_path):
    """A hang, a refused launch and a wrong result each give a row, and no other row is lost."""
    result, results, rows = rehearse(tmp_path, "--faults")
    assert result.returncode == 1, result.stdout + result.stderr
    faulty = {
        "canary": FAILED, "smoke-cuda": FAILED, "check-cuda": FAILED, "attention-cuda": NOT_RUN,
    }  # fmt: skip
    # The Triton steps pass, and so do all steps without an inserted mistake.
    assert results == {**dict.fromkeys((s.name for s in steps(ROOT)), OK), **faulty}
    launched = {kernel for row in rows["smoke"] for kernel in row.get("kernels", ())}
    assert launched == {"layer_norm_forward", "layer_norm_backward", "sum_partials"}
    for name in ("check-bfloat16", "check-float32"):
        assert all(row["passed"] for row in rows[name] if "tensor" in row)
    assert any("contender" in row for row in rows["attention"])

    canaries = {row["canary"]: row for row in rows["canary"] if "canary" in row}
    assert {family: row["result"] for family, row in canaries.items()} == {
        **dict.fromkeys(canary.FAMILIES, canary.OK), "attention": canary.HANGS,
    }  # fmt: skip
    for name in ("smoke-cuda", "check-cuda", "attention-cuda"):
        assert rows[name][-1]["skipped"] == {"attention": "its canary hangs"}

    smoked = {
        (row["op"], row["case"]): row["faults"]
        for row in rows["smoke-cuda"]
        if row.get("smoke") == "done"
    }
    assert smoked == {
        ("layer_norm", "residual"): [],
        ("layer_norm", "dropout"): [f"the process was given up: {REHEARSED_CASE_LIMIT_S:.1f} s"],
        ("layer_norm", "no_bias"): [],
        ("linear_gelu", "erf"): [],
        ("linear_gelu", "tanh"): [f"RuntimeError: {faults.REFUSAL}"],
        ("feed_forward", "erf"): [],
    }
    checked = {}
    for row in rows["check-cuda"]:
        if "tensor" in row:
            checked.setdefault((row["op"], row["case"]), {})[row["tensor"]] = row["passed"]
    assert all(checked["layer_norm", "residual"].values())
    assert all(checked["linear_gelu", "erf"].values())
    assert checked["linear_gelu", "tanh"] == {"run": False}
    assert checked["feed_forward", "erf"]["out"] is False
    assert set(checked) == set(smoked) - {("layer_norm", "dropout"), ("layer_norm", "no_bias")}
