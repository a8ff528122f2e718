"""The CPU benchmark runs on tiny shapes; its rules give the right verdicts on invented times."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import _fresh_python
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for imports from benchmarks/

from benchmarks.cpu import __main__ as cpu
from benchmarks.cpu import (
    accuracy,
    breakdown,
    ceilings,
    contest,
    encoder,
    report,
    runtimes,
    tiles,
)
from benchmarks.cpu.ceilings import FORMATS, Ceilings
from benchmarks.cpu.contest import CpuRow, Setting
from benchmarks.cpu.remote import Failed, Remote
from fastbert.bench import quantized_accuracy
from fastbert.bench.contest import goals_met
from fastbert.bench.encoder import BASE, SMALL, EncoderShape
from fastbert.bench.limits import CPU_TARGETS, Target
from fastbert.bench.timing import Timing, alternate
from fastbert.machine import describe

MACHINE = Ceilings(
    2,
    {"fp32": 2e11, "bf16": 2e11, "int8": 3e11},
    {"fp32": "FMA", "bf16": "widened to fp32", "int8": "pairs"},
    2e10,
    1.3e11,
    2e10,
)


def test_the_schedules_of_tiles_are_timed(tmp_path):
    said: list[str] = []
    before = tiles.CHOICE.read_text("utf-8")
    assert cpu.run(["tiles"], tmp_path, 1, quick=True, notify=said.append) == 0
    content = json.loads((tmp_path / "tiles.json").read_text("utf-8"))
    assert [set(row["seconds"]) for row in content["rows"]] == [set(tiles.SCHEDULES)] * 3
    assert content["fastest"] in tiles.SCHEDULES
    assert f"`{content['fastest']}`" in (tmp_path / "tiles.md").read_text("utf-8")
    assert tiles.CHOICE.read_text("utf-8") == before  # --quick does not write the choice


def test_a_processor_without_tiles_says_so(monkeypatch):
    monkeypatch.setattr(tiles, "has_tiles", lambda: False)
    said: list[str] = []
    content = tiles.run(0.0, said.append, quick=False)
    assert content["fastest"] is None
    assert said == [f"tiles: {tiles.NO_TILES}"]
    assert tiles.lines(content) == ["", f"Not timed: {tiles.NO_TILES}."]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([(1.0, 1.0, 1.0)], "in_turn"),
        ([(1.0, 0.995, 0.995)], "in_turn"),
        ([(1.0, 0.9, 0.9)], "overlapped"),
        ([(1.0, 0.9, 0.8)], "fetched"),
        ([(1.0, 1.2, 0.9)], "fetched"),
        # All calls have the same weight, whether a call takes a second or a millisecond.
        ([(1e-3, 5e-4, 1e-3), (1.0, 1.1, 1.0)], "overlapped"),
    ],
)
def test_the_fastest_schedule_of_all_calls_is_chosen(times, expected):
    rows = [{"seconds": dict(zip(tiles.SCHEDULES, row, strict=True))} for row in times]
    assert tiles.fastest(rows) == expected


def test_the_package_reads_the_schedule_that_a_run_has_written(tmp_path):
    """A new process that reads the written file uses the schedule in the file."""
    path = tmp_path / "tile_schedule.json"
    tiles.keep("fetched", describe(), path)
    assert "benchmarks.cpu tiles" in json.loads(path.read_text("utf-8"))["reason"]
    program = (
        "import pathlib\n"
        "read = pathlib.Path.read_text\n"
        f"name, other = {path.name!r}, pathlib.Path({str(path)!r})\n"
        "pathlib.Path.read_text = lambda self, *given, **named: read(\n"
        "    other if self.name == name else self, *given, **named)\n"
        "from fastbert.ops.backend import EXTENSION\n"
        "print(EXTENSION.tile_schedule())\n"
    )
    result = _fresh_python.run("-c", program)
    assert result.stdout == "fetched\n", result.stderr


@pytest.mark.every_case
def test_a_run_leaves_table_json_and_plot(tmp_path):
    said: list[str] = []
    names = ("fastbert fp32", "transformers eager fp32")
    status = cpu.run(["bert-base"], tmp_path, 1, names, quick=True, notify=said.append)
    assert status == 0, "\n".join(said)
    content = json.loads((tmp_path / "bert-base.json").read_text("utf-8"))
    rows = {(row["label"], row["contender"]): row for row in content["rows"]}
    shapes = [match.shape.name for match in encoder.matches(encoder.QUICK)]
    assert set(rows) == {(shape, name) for shape in shapes for name in names}
    for row in rows.values():
        assert row["seconds"] > 0
        assert row["peak_bytes"] > 1 << 20
        assert row["difference"] < 1e-4
    assert all("ratio" in rows[shape, names[0]] for shape in shapes)
    assert (tmp_path / "bert-base.png").stat().st_size > 1000
    page = (tmp_path / "bert-base.md").read_text("utf-8")
    assert "--quick: tiny shapes, the times mean nothing" in page
    assert f"| {shapes[0]} | fastbert fp32 |" in page


def test_unknown_names_are_refused(monkeypatch, capsys):
    for arguments, message in (
        (["latency"], "SECTION: got latency, allowed: tiles, encode, rerank, embedder, documents"),
        (["--engine", "TVM"], "--engine: got TVM, allowed: fastbert bf16"),
        (["--threads", "0"], "--threads: got 0, allowed: 1 …"),
    ):
        monkeypatch.setattr(sys, "argv", ["benchmarks.cpu", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cpu.main()
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


def test_the_shapes_and_targets():
    matches = {match.shape.name: match for match in encoder.matches(encoder.SCALES["bert-base"])}
    assert list(matches) == [
        "BERT-base 1×32",
        "BERT-base 1×128",
        "BERT-base 8×128 full",
        "BERT-base 8×128 half padded",
        "BERT-base 4×512 full",
        "BERT-base 4×512 half padded",
    ]
    for name in ("BERT-base 8×128 half padded", "BERT-base 4×512 half padded"):
        lengths = matches[name].shape.lengths
        assert 0.45 < sum(lengths) / (len(lengths) * max(lengths)) < 0.55

    def target(shape: str, engine: str) -> Target:
        return encoder.target_of(row(engine, label=shape), matches[shape])

    assert target("BERT-base 8×128 full", "fastbert bf16") == Target(1.1, 2.0)
    assert target("BERT-base 4×512 half padded", "fastbert bf16 autocast") == Target(2.3, 3.5)
    assert target("BERT-base 1×32", "fastbert bf16") == Target(1.3, 1.6)
    assert target("BERT-base 8×128 half padded", "fastbert fp32") == Target(2.0)
    assert target("BERT-base 4×512 full", "fastbert int8") == Target(1.1)
    assert all((match.kind, form) in CPU_TARGETS for match in matches.values() for form in FORMATS)


# Tests with invented rows and workers


def row(name: str, seconds: float | None = None, label: str = "l") -> CpuRow:
    engine = runtimes.BY_NAME[name]
    return CpuRow(
        "s", "s", label, "encoder", engine.form, "inference", name, engine.ours, seconds=seconds
    )


def test_each_format_is_held_against_its_own_peers():
    rows = {
        name: row(name, seconds)
        for name, seconds in {
            "fastbert bf16": 2.0,
            "fastbert fp32": 4.0,
            "fastbert int8": 1.0,
            "transformers eager fp32": 9.0,
            "transformers sdpa fp32": 8.0,
            "transformers sdpa bf16": 30.0,
            "ONNX Runtime fp32": 5.0,
        }.items()
    }
    rows["OpenVINO bf16"] = row("OpenVINO bf16")
    rows["OpenVINO bf16"].refused = "not installed"
    contest.judge(list(rows.values()), lambda _: Target(2.0, 3.0))
    ours = [rows[f"fastbert {form}"] for form in ("bf16", "fp32", "int8")]
    assert [(r.ratio, r.against) for r in ours] == [
        (2.5, "ONNX Runtime fp32"),
        (1.25, "ONNX Runtime fp32"),
        (5.0, "ONNX Runtime fp32"),
    ]
    assert [r.best_ratio for r in ours] == [2.5, 1.25, 5.0]
    # A faster peer in bf16 counts for bf16 and int8, and a faster peer in int8 for int8 only.
    rows["OpenVINO int8"] = row("OpenVINO int8", 0.5)
    rows["transformers sdpa bf16"].seconds = 1.0
    contest.judge(list(rows.values()), lambda _: Target())
    assert [r.against for r in ours] == [
        "transformers sdpa bf16",
        "ONNX Runtime fp32",
        "OpenVINO int8",
    ]
    assert [r.best_ratio for r in ours] == [0.25, 0.125, 0.5]
    del rows["OpenVINO int8"]
    rows["transformers sdpa bf16"].seconds = 30.0
    contest.judge(list(rows.values()), lambda _: Target(2.0, 3.0))
    assert goals_met(ours[0]) == "floor 2: met, goal 3: NOT met"
    assert rows["ONNX Runtime fp32"].ratio is None
    dicts = [contest_dict(r) for r in rows.values()]
    lines = "\n".join(report.contest_lines(dicts))
    assert "| l | fastbert bf16 | 2.50 | ONNX Runtime fp32 | 2: met | 3: **not met** |" in lines
    assert lines.endswith("|\n\n- OpenVINO bf16: not installed")
    # If the library has a time for another shape, the reason is only in the table.
    lines = "\n".join(report.contest_lines([*dicts, {**dicts[0], "contender": "OpenVINO bf16"}]))
    assert "| not installed |" in lines
    assert "- OpenVINO bf16" not in lines


def contest_dict(row: CpuRow) -> dict:
    row.rate, row.tflops, row.of_measured_floor = 1.0, 1.0, 0.5
    row.p10 = row.p90 = row.seconds
    return {k: v for k, v in vars(row).items() if v is not None}


class Fake:
    """A fake worker whose calls report the times `seconds` and `sample`."""

    def __init__(self, seconds: float, sample=(1.0, 2.0)) -> None:
        self.seconds, self.sample, self.calls = seconds, list(sample), 0

    def ask(self, do: str, **_: object) -> dict:
        if self.seconds < 0:
            raise Failed("no such kernel")
        memory = {"peak": 1 << 20}
        return memory if do == "peak" else {"seconds": self.seconds, "sample": self.sample}

    def measure(self, first: int, calls: int) -> float:
        self.calls += calls
        return self.seconds


def played(workers: dict[str, Fake], setting: Setting | None = None) -> dict[str, CpuRow]:
    shape = EncoderShape("tiny 2×16", SMALL, (16, 9))
    setting = setting or Setting("s", 0.0, lambda text: None, ceilings=MACHINE)
    notes = {"OpenVINO bf16": "a note"}
    result = contest.play(
        shape, "series", workers, {"ONNX Runtime fp32": "not installed: onnx"}, notes, setting
    )
    return {found_row.contender: found_row for found_row in result}


def test_nobody_is_left_out_silently(monkeypatch):
    monkeypatch.setattr(contest, "SETTLE_S", 0.0)
    workers = {
        "fastbert bf16": Fake(20.0),
        "transformers sdpa fp32": Fake(1.0),
        "transformers eager bf16": Fake(9.0),
        "transformers sdpa bf16": Fake(1.2, sample=(-1.0, 5.0)),
        "torch.compile frozen fp32": Fake(1.1, sample=(1.0, float("nan"))),
        "OpenVINO fp32": Fake(-1.0),
        "OpenVINO bf16": Fake(2.0),
    }
    rows = played(workers)
    assert list(rows) == [n for n in runtimes.BY_NAME if n in workers or n == "ONNX Runtime fp32"]
    assert rows["fastbert bf16"].samples == contest.MIN_SAMPLES
    assert rows["transformers sdpa fp32"].samples == contest.MIN_SAMPLES
    assert workers["transformers eager bf16"].calls == 0
    assert rows["transformers eager bf16"].seconds == 9.0
    assert rows["OpenVINO bf16"].samples == 1
    assert rows["OpenVINO bf16"].note == "a note; one call: too slow to be the fastest peer"
    assert {name: r.refused for name, r in rows.items() if r.refused} == {
        "transformers sdpa bf16": "its result is wrong by 1.61 of the RMS of fp32",
        "torch.compile frozen fp32": "its result is not finite",
        "OpenVINO fp32": "no such kernel",
        "ONNX Runtime fp32": "not installed: onnx",
    }
    assert rows["fastbert bf16"].tflops == pytest.approx(
        EncoderShape("", SMALL, (16, 9)).flops / 20.0 / 1e12
    )


def test_a_worker_that_ends_in_its_turns_spoils_no_table(monkeypatch):
    monkeypatch.setattr(contest, "SETTLE_S", 0.0)

    class Mortal(Fake):
        def measure(self, first: int, calls: int) -> float:
            if self.calls:
                raise Failed("its process ended")
            return super().measure(first, calls)

    rows = played({"fastbert bf16": Fake(1.0), "OpenVINO fp32": Mortal(1.0)})
    assert rows["fastbert bf16"].samples == rows["OpenVINO fp32"].samples == 1
    assert "the turns ended early: its process ended" in rows["fastbert bf16"].note


def test_what_would_take_too_long_is_predicted(monkeypatch):
    monkeypatch.setattr(contest, "SETTLE_S", 0.0)
    flops = contest.padded_flops(EncoderShape("", SMALL, (16, 9)))
    setting = Setting("s", 0.0, lambda text: None, ceilings=MACHINE)
    setting.rates = {"transformers sdpa fp32": 1 / flops, "transformers sdpa bf16": 24 / flops}
    workers = {"transformers sdpa fp32": Fake(1.0), "transformers sdpa bf16": Fake(24.0)}
    rows = played(workers, setting)
    expected = "left out: about 24 s a call, 24.0 × the fastest, by its last shape"
    assert rows["transformers sdpa bf16"].refused == expected


def test_warm_calls_are_first_samples():
    worker = Fake(0.5)

    class Watch:
        def measure(self, call, first, calls):
            return call.measure(first, calls)

    timing = alternate(
        {"a": worker}, watch=Watch(), once={"a": 0.7}, seconds=0.0, min_samples=3, max_samples=3
    )
    assert timing == {"a": Timing(0.5, 0.5, 0.7, 3)}
    assert worker.calls == 2


def test_a_worker_gives_its_reason_and_can_end(tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with Remote("ONNX Runtime fp32", tmp_path, 1) as worker:
        with pytest.raises(Failed, match=r"AttributeError.*no_such_request"):
            worker.ask("no_such_request")
        worker._process.kill()
        with pytest.raises(Failed, match="its process ended: exit status -9"):
            worker.ask("peak")


def test_limits_are_measured():
    limits = ceilings.measure(1, size=64, copied=1 << 20)
    assert set(limits.products) == set(limits.units) == set(ceilings.FORMATS)
    # A lower rate would mean that the measured loop is wrong.
    assert min(limits.products.values()) > 1e9
    assert limits.limits("fp32").measured_flops == limits.products["fp32"]
    assert limits.bytes > 1e8


def test_the_breakdown_counts_a_whole_forward_pass():
    lengths = (128,) * 8
    amounts = breakdown.work(BASE, lengths, 2)
    shape = EncoderShape("", BASE, lengths)
    assert amounts[breakdown.WHOLE][1].flops == pytest.approx(shape.flops)
    measured = [
        {"operation": "QKV", "seconds": 0.3, "count": 12, "flops": 3e10, "bytes": 1e6},
        {"operation": breakdown.WHOLE, "seconds": 0.5, "count": 1, "flops": 3e10, "bytes": 0.0},
    ]
    result = breakdown.with_roofline(measured, MACHINE.limits("fp32"))
    assert result[0]["of_roofline"] == pytest.approx(0.5)
    assert result[0]["share"] == pytest.approx(0.6)
    assert result[-1]["operation"] == breakdown.REST
    assert result[-1]["seconds"] == pytest.approx(0.2)
    entries = [{"label": "l", "engine": "fast", "operations": result}]
    entries.append({"label": "m", "engine": "fast", "refused": "too slow"})
    assert breakdown.lines(entries)[-5:] == [
        "| shape | engine | QKV | whole | rest |",
        "|---|---|---|---|---|",
        "| l | fast | 300.00 (60 %, 50 %) | 500.00 (100 %, 30 %) | 200.00 (40 %) |",
        "",
        "- m, fast: not measured: too slow",
    ]


def test_a_page_begins_with_its_section_and_the_machine():
    lines = list(report.page({"section": "minilm", "header": ["monday", "torch"], "rows": []}))
    assert lines[:4] == ["# minilm: fastbert and its peers on the CPU", "", "- monday", "- torch"]


def test_the_estimate_is_minutes():
    fast = dataclasses.replace(MACHINE, torch_fp32=2e11, torch_bf16=8e11)
    assert 60 < sum(cpu.estimate(name, fast) for name in cpu.SECTIONS) < 1800
    assert cpu.estimate("encode", fast) < cpu.estimate("encode", MACHINE)


def test_real_sentences():
    sentences = quantized_accuracy.real_sentences(64)
    assert len(sentences) == len(set(sentences)) == 64
    assert all(sentence.endswith(".") and len(sentence.split()) > 5 for sentence in sentences)


def test_errors_and_order_of_embeddings():
    import torch

    right = torch.nn.functional.normalize(torch.randn(12, 8).double())
    same = quantized_accuracy.errors("a", right, "b", right)
    assert same["max_error"] == 0.0
    assert same["spearman"] == pytest.approx(1.0)
    assert same["top_1"] == 1.0
    other = quantized_accuracy.errors("a", right.flip(0), "b", right)
    assert other["max_error"] > 0.1
    assert other["kendall"] < 0.9
    assert "| a | b |" in "\n".join(accuracy.lines({"sentences": 12, "rows": [other]}))
