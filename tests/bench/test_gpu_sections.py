"""The GPU command runs its sections with time limits, and writes logs and a summary."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for imports from benchmarks/

from benchmarks.gpu import __main__ as gpu  # noqa: E402
from benchmarks.gpu import bench, floors, sections, summary  # noqa: E402
from benchmarks.gpu.contest import GpuRow  # noqa: E402
from benchmarks.gpu.sections import Section  # noqa: E402
from fastbert.bench.contest import to_dict  # noqa: E402
from fastbert.ops import backend  # noqa: E402

PYTHON = sys.executable


def command(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *arguments])
    return gpu.main()


def test_unknown_section(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        command(monkeypatch, "--dry-run", "profile")
    assert stopped.value.code == 2
    allowed = "SECTION: got profile, allowed: build, compile, test-kernels"
    assert allowed in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_nothing_runs(monkeypatch, tmp_path, capsys):
    assert command(monkeypatch, "--out", str(tmp_path / "gpu")) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "gpu").exists()


def test_every_test_is_in_one_section():
    found_sections = sections.sections(ROOT)
    paths = [
        argument
        for section in found_sections.values()
        for command in section.commands
        for argument in command
        if argument.startswith("tests")
    ]
    assert len(paths) == len(set(paths))
    covered = [ROOT / path for path in (*paths, *sections.NOT_ON_A_GPU)]
    for test in (ROOT / "tests").rglob("test_*.py"):
        assert any(path in (test, *test.parents) for path in covered), test
    assert all((ROOT / path).exists() for path in paths)


def test_the_calls_have_every_section_and_their_needs():
    calls = sections.CALLS
    assert {name for call in calls for name in call} == set(sections.sections(ROOT))
    for call in calls:
        needs_extension = {"check", "bench-rows", "bench-gemm"} & set(call)
        if needs_extension or any(name.startswith("test-") for name in call):
            assert call[0] == "build", call
    later = [name for call in calls for name in call if name != "build"]
    assert len(later) == len(set(later))


def test_a_pytest_section_ignores_what_is_in_its_folders_only():
    command = sections.pytest(("tests/kernels",))
    ignored = [word for word in command if word.startswith("--ignore")]
    names = ("test_compiled_kernels", "test_aot")
    assert set(ignored) == {f"--ignore=tests/kernels/{name}.py" for name in names}


def test_the_order_and_the_names():
    names = list(sections.sections(ROOT))
    assert names[:3] == ["build", "compile", "test-kernels"]
    assert set(bench.SECTIONS) < set(names)


def run(section, folder):
    said: list[str] = []
    return sections.run(section, folder, notify=said.append), "\n".join(said)


def test_a_section_that_fails_stops_and_says_why(tmp_path):
    commands = ((PYTHON, "-c", "print('first'); raise SystemExit(3)"), (PYTHON, "-c", "never"))
    result, said = run(Section("build", "", commands), tmp_path)
    assert result["status"] == 3
    assert "first" in result["tail"]
    assert "FAILED, exit status 3" in said
    log = (tmp_path / "build.log").read_text("utf-8")
    assert "first" in log
    assert "never" not in log


def test_the_build_must_have_cuda(tmp_path):
    if backend.EXTENSION_HAS_CUDA:
        pytest.skip("needs an extension without CUDA")
    build = sections.sections(tmp_path)["build"]
    result, said = run(Section("build", "", build.commands[1:2]), tmp_path)
    assert result["status"] == 1
    assert "the extension has no CUDA kernels" in said


def test_a_section_is_ended_at_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(sections, "LIMIT_S", 1)
    # The time limit must also end a child process of the command.
    sleep = "import time; time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
    result, _ = run(Section("check", "", ((PYTHON, "-c", code),)), tmp_path)
    assert result["status"] == 124
    assert result["seconds"] < 30
    assert "ended after 1 s" in result["tail"]


def test_the_rest_of_the_command_is_a_limit_too(tmp_path):
    slow = Section("check", "", ((PYTHON, "-c", "import time; time.sleep(60)"),))
    assert sections.run(slow, tmp_path, notify=print, seconds=1.5)["status"] == 124
    result = sections.run(slow, tmp_path, notify=print, seconds=-3.0)
    assert (result["status"], result["seconds"]) == (124, 0.0)


def test_a_benchmark_is_told_how_many_minutes_it_has(tmp_path):
    shows = Section("bench-rows", "", ((PYTHON, "-c", "import sys; print(sys.argv[1:])"),))
    assert "--minutes" not in run(shows, tmp_path)[1]
    said: list[str] = []
    sections.run(shows, tmp_path, notify=said.append, seconds=330.0)
    assert "--minutes 4.0" in said[0]
    assert "['--minutes', '4.0']" in (tmp_path / "bench-rows.log").read_text("utf-8")


def test_figures_replace_the_log(tmp_path):
    code = f"open({str(tmp_path / 'compile.json')!r}, 'w').write('{{}}')"
    result, _ = run(Section("compile", "", ((PYTHON, "-c", code),)), tmp_path)
    assert result["status"] == 0
    assert not (tmp_path / "compile.log").exists()


def test_standard_output_can_go_to_a_file(tmp_path):
    code = "import sys; print('{}'); print('progress', file=sys.stderr)"
    section = Section("check", "", ((PYTHON, "-c", code),), stdout="check.json")
    assert run(section, tmp_path)[0]["status"] == 0
    assert (tmp_path / "check.json").read_text("utf-8") == "{}\n"


def test_the_summary_keeps_earlier_sections(tmp_path, capsys):
    first = {"section": "build", "status": 0, "seconds": 1.0}
    second = {"section": "check", "status": 1, "seconds": 2.0}
    summary.write(tmp_path, [first])
    summary.write(tmp_path, [second])
    content = json.loads((tmp_path / summary.NAME).read_text("utf-8"))
    assert [s["section"] for s in content["sections"]] == ["build", "check"]
    assert content["machine"]["versions"]["torch"]
    summary.print_table(tmp_path, [first, second])
    printed = capsys.readouterr().out
    assert "FAILED, exit status 1" in printed.splitlines()[-1]


def row(contender, seconds, **more):
    common = ("s", "s", "l", "op", "bfloat16", "forward")
    ours = contender.startswith("fastbert")
    result = GpuRow(*common, contender, ours, seconds=seconds, rate=1.0, unit="TFLOP/s", **more)
    return to_dict(result)


def test_the_table_of_a_section(tmp_path):
    rows = [
        row("fastbert triton*", 2e-6, of_goal=0.5, of_floor=0.25, ratio=2.0, against="eager"),
        row("fastbert path=short", 1e-6),
        row("fastbert path=general", 3e-6),
        row("fastbert layout=dense", 1.9e-6),
        row("eager", 4e-6, peak_bytes=1 << 30),
        row("tanh epilogue", 1e-6, same_function=False),
        row("x", None, refused="no such kernel"),
    ]
    (tmp_path / "bench-rows.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    text = "\n".join(summary.lines_of(tmp_path, "bench-rows"))
    assert "1 TFLOP/s  2.00× eager, 25 % of the limit, 50 % of the goal" in text
    assert "fastbert triton*                 2.0 µs" in text
    assert "varlen over dense: s l: +5.3 %, OVER 3 %" in text
    assert "variants: s l: fastbert path=short 1.0 µs, fastbert path=general 3.0 µs" in text
    assert "not timed: x: no such kernel" in text
    assert "peak: l eager: 1,024 MiB" in text


def test_floors_are_a_table():
    text = list(floors.lines(["bench-attention"]))
    assert text[0].count("|") == text[1].count("|") == text[2].count("|")
    assert text[2].startswith("| attention D64 forward | S512 | 34.36 | 134.2 | 43.49 | products")
