"""``fastbert check``."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace

import _fresh_python
import pytest
import torch

from fastbert import json_file
from fastbert.cli.common import print_json_rows
from fastbert.ops import backend
from fastbert.testing import ahead_of_time, model_parity, parity

FLOAT32 = ("--backend", "reference", "--dtype", "float32")
REFERENCE = (*FLOAT32, "--quick")


def test_table_and_result(run):
    result = run("check", "--op", "layer_norm", *REFERENCE)
    assert result.exit_code == 0
    assert "layer_norm" in result.stdout
    assert "ok" in result.stdout
    assert "FAILED" not in result.stdout


def test_json_has_a_row_per_tensor_and_their_worst(run):
    result = run("check", "--op", "layer_norm", *REFERENCE, "--json")
    content = json.loads(result.stdout)
    assert content["passed"] is True
    expected = list(parity.check("layer_norm", "reference", torch.float32, quick=True))
    assert [row["tensor"] for row in content["rows"]] == [row.tensor for row in expected]
    (line,) = content["summary"]
    assert line["ratio"] == max(row["ratio"] for row in content["rows"])
    assert line["cases"] == len({row["case"] for row in content["rows"]})


def test_a_row_is_in_the_output_before_the_next_is_computed(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(written), "utf-8"))
    arrived = []

    def rows():
        for number in range(3):
            yield {"number": number}
            # The rows must have left all buffers, so that another process could read them now.
            arrived.append([json.loads(line) for line in written.getvalue().splitlines()[1::2]])

    def rest(known):
        return {"count": len(known)}

    assert print_json_rows("rows", rows(), rest) == [{"number": n} for n in range(3)]
    assert [len(lines) for lines in arrived] == [1, 2, 3]
    sys.stdout.flush()
    expected = {"rows": [{"number": n} for n in range(3)], "count": 3}
    assert json.loads(written.getvalue()) == expected


@pytest.mark.parametrize(
    ("command", "module", "name"),
    [
        (("--op", "layer_norm", *REFERENCE), parity, "check"),
        (("--aot", "--arch", "90"), ahead_of_time, "compile_launches"),
    ],
)
def test_the_rows_before_a_hang_are_kept(run, monkeypatch, command, module, name):
    """The output has the rows that were computed before a hang, which an interruption simulates."""
    row = {}

    def rows(*arguments, **options):
        first = next(honest(*arguments, **options)) if module is parity else compiled()
        row.update(json_file.jsonable(first))
        yield first
        raise SystemExit(130)

    honest = getattr(module, name)
    monkeypatch.setattr(module, name, rows)
    result = run("check", *command, "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout.splitlines()[1]) == row


def test_a_refused_launch_has_a_row_and_the_other_cases_run(run, monkeypatch):
    honest, seen = parity.check_case, []

    def check_case(case, *arguments):
        seen.append(case.name)
        if len(seen) == 2:
            raise RuntimeError("CUDA error: invalid argument\n  at layer_norm.cu")
        return honest(case, *arguments)

    monkeypatch.setattr(parity, "check_case", check_case)
    result = run("check", "--op", "layer_norm", *REFERENCE, "--json")
    assert result.exit_code == 1
    rows = json.loads(result.stdout)["rows"]
    (bad,) = (row for row in rows if not row["passed"])
    assert (bad["case"], bad["tensor"]) == (seen[1], "run")
    assert "RuntimeError: CUDA error: invalid argument at layer_norm.cu" in bad["detail"]
    assert len(seen) == 3
    assert {row["case"] for row in rows} == set(seen)
    table = run("check", "--op", "layer_norm", *REFERENCE)
    assert table.exit_code == 0


def test_a_model_that_cannot_run_has_a_row(monkeypatch):
    def check_step(*arguments):
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(model_parity, "check_step", check_step)
    rows = list(model_parity.check_model("reference", torch.float32))
    assert [(row.tensor, row.passed) for row in rows] == [("run", False)] * len(rows)
    assert "invalid argument" in rows[0].detail


@pytest.mark.parametrize("error", [1.0, math.nan])
def test_one_bad_tensor_fails_and_says_how_to_reproduce(run, monkeypatch, error):
    honest = parity.check

    def check(*arguments, **options):
        rows = list(honest(*arguments, **options))
        yield from rows[:-1]
        yield replace(rows[-1], error=error, passed=False, detail="off by one")

    monkeypatch.setattr(parity, "check", check)
    result = run("check", "--op", "linear_gelu", *REFERENCE)
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert "off by one" in result.stdout
    assert "reproduce: fastbert check --op linear_gelu" in result.stdout
    as_json = run("check", "--op", "linear_gelu", *REFERENCE, "--json")
    assert as_json.exit_code == 1
    content = json.loads(as_json.stdout)
    assert content["passed"] is False
    assert content["summary"][0]["passed"] is False


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--op", "softmax"), "--op: got 'softmax', allowed: attention"),
        (("--backend", "rocm"), "--backend: got 'rocm', allowed: reference"),
        (("--dtype", "int8"), "--dtype: got 'int8', allowed: float32"),
        (("--op", "layer_norm", "--case", "huge"), "case: got 'huge', allowed: "),
    ],
)
def test_unknown_names(refused, arguments, named):
    assert named in refused("check", *arguments)


def test_the_whole_model_is_an_allowed_name(refused):
    assert refused("check", "--op", "softmax").endswith(", bert")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_backend_that_cannot_serve_here(refused):
    assert "cuda" in refused("check", "--op", "layer_norm", "--backend", "cuda")


@pytest.mark.skipif(not backend.HAS_TRITON, reason="needs triton")
def test_triton_is_checked_without_a_gpu():
    command = ["-m", "fastbert", "check", "--op", "linear_gelu", "--case", "tanh"]
    result = _fresh_python.run(*command, "--backend", "triton", "--dtype", "float32", "--json")
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    assert {row["backend"] for row in content["rows"]} == {"triton"}


def test_random_cases_and_one_of_them_by_its_name(run, refused):
    result = run("check", "--op", "layer_norm", *FLOAT32, "--cases", "3", "--seed", "2", "--json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)["rows"]
    assert {row["case"] for row in rows} == {f"random-2-{i}" for i in range(3)}
    command = rows[0]["command"].split()
    assert command[:4] == ["fastbert", "check", "--op", "layer_norm"]
    again = json.loads(run(*command[1:], "--json").stdout)["rows"]
    assert again == [row for row in rows if row["case"] == "random-2-0"]
    assert "--case" in refused("check", "--cases", "3", "--case", "plain")
    assert "--quick" in refused("check", "--cases", "3", "--quick")


def test_the_command_of_a_row_names_the_seed(run):
    result = run("check", "--op", "linear_gelu", *REFERENCE, "--seed", "5", "--json")
    assert all(row["command"].endswith("--seed 5") for row in json.loads(result.stdout)["rows"])


def compiled(**changes) -> ahead_of_time.Compiled:
    launch = ahead_of_time.Compiled(
        name="attention_dkv", noun="attention", arch=90, dtype="bfloat16", warps=8, registers=255,
        stack=0, shared=45056, matrix="HGMMA", loads={16: 12, 4: 8}, tf32=False, has_dot=True,
        narrow_products=[], overwritten=[], stale=[], constants={"HEAD_DIM": 64}, number=1, total=2,
    )  # fmt: skip
    launch = replace(launch, **changes)
    return replace(launch, faults=ahead_of_time.judge(launch))


def test_what_was_compiled_is_printed_with_its_faults(run, monkeypatch):
    launches = [compiled(), compiled(number=2, stack=80, arch=80, matrix="HMMA")]
    seen = []

    def compile_launches(architectures, processes):
        seen.append(architectures)
        return iter(launches)

    monkeypatch.setattr(ahead_of_time, "compile_launches", compile_launches)
    result = run("check", "--aot", "--arch", "80,90")
    assert seen == [(80, 90)]
    assert result.exit_code == 1
    assert "attention_dkv" in result.stdout
    assert "HGMMA" in result.stdout
    assert "80 bytes of stack: registers spill" in result.stdout
    assert "1 of 2 FAILED" in result.stdout
    content = json.loads(run("check", "--aot", "--json").stdout)
    assert content["passed"] is False
    assert [line["stack"] for line in content["summary"]] == [80, 0]
    assert len(content["launches"]) == 2
    launches.pop()
    assert run("check", "--aot").exit_code == 0


def test_ahead_of_time_without_triton_or_for_an_unknown_gpu(refused, monkeypatch):
    assert "--arch: got '70', allowed: some of 80, 89, 90, 100, 120" in refused(
        "check", "--aot", "--arch", "70"
    )
    monkeypatch.setattr(backend, "HAS_TRITON", False)
    assert "triton is not installed" in refused("check", "--aot")
