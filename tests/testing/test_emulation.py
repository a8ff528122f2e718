"""The PTX machine runs every shipped launch of compiled GPU kernels, and rejects broken kernels.

`make emulate` runs all quick cases and random cases; this file runs one or two cases of each
operation. Triton kernels run for sm_90 only; with `make every-case`, they also run for sm_80.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from quick_cases import long_case

from fastbert.ops import backend as backends
from fastbert.testing import emulation
from fastbert.testing.emulation import EmulatedRun, Selection, emulate, summarize
from fastbert.testing.parity import ParityRow

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(not backends.HAS_TRITON, reason="needs triton"),
    # Compilation takes most of the time of this file.
    pytest.mark.timeout(1500),
]

# The entries are (operation, case, dtype). Together, they reach every launch except those of
# attention weights.
SUBSET = (
    ("attention", "plain", "bfloat16"),
    ("attention", "bias_gradient", "bfloat16"),
    ("attention", "one_query", "float16"),
    ("attention", "plain", "float32"),
    ("attention_varlen", "spread", "float16"),
    ("relative_attention", "deberta", "bfloat16"),
    ("relative_attention", "xlnet", "float16"),
    ("layer_norm", "dropout", "bfloat16"),
    ("rms_norm", "residual", "float16"),
    ("rotary", "strided", "float32"),
    ("linear_gelu", "erf", "float32"),
    ("linear_gelu", "tanh", "float16"),
    ("feed_forward", "geglu", "bfloat16"),
    ("feed_forward", "erf", "float16"),
    ("embedding", "plain", "bfloat16"),
    ("linear_cross_entropy", "sum", "float16"),
    ("splade", "spread", "float16"),
)
# No case reaches these launches, so tests/ptx/attention_weights_on_ptx.py runs them.
WITHOUT_CASE = {"attention_weights", "relative_attention_weights"}


def available() -> tuple[str, ...]:
    """Return the backends whose compilers exist on this machine; all tests here need Triton."""
    # nvcc crashes if libasan is preloaded.
    asan = "libasan" in os.environ.get("LD_PRELOAD", "")
    return ("triton",) if asan or emulation.obstacle("cuda") else ("triton", "cuda")


@pytest.fixture(scope="module")
def cache(pytestconfig):
    """Return Triton's cache folder, which persists so that later runs compile only changes."""
    return pytestconfig.cache.mkdir("triton")


@pytest.fixture(scope="module")
def architectures(pytestconfig):
    return emulation.ARCHITECTURES if pytestconfig.getoption("--every-case") else ("sm_90",)


@pytest.fixture(scope="module")
def runs(cache, architectures):
    selections = [
        Selection(arch, ("triton",), op, case, dtype)
        for arch in architectures
        for op, case, dtype in SUBSET
    ]
    if "cuda" in available():
        selections += [
            Selection(arch, ("cuda",), op, case, dtype)
            for arch in emulation.ARCHITECTURES
            for op, case, dtype in (
                ("attention", "dropout", "bfloat16"),
                ("attention_varlen", "spread", "float16"),
                ("layer_norm", "dropout", "bfloat16"),
                ("linear_gelu", "erf", "float16"),
                ("feed_forward", "tanh", "float32"),
                ("feed_forward", "erf", "bfloat16"),
            )
        ]
    return list(emulate(selections, processes=2, cache=cache))


@pytest.mark.every_case
def test_a_case_of_each_operation_passes_on_compiled_kernels(runs):
    failures = [(run.command, run.fault, run.rows) for run in runs if not run.passed]
    assert not failures
    assert [run.number for run in runs] == list(range(1, len(runs) + 1))
    assert {run.total for run in runs} == {len(runs)}
    assert {run.backend for run in runs} == set(available())
    assert all(row.tensor != "out" or row.yardstick >= 0 for run in runs for row in run.rows)


@pytest.mark.every_case
def test_every_shipped_launch_is_reached_on_every_architecture(runs, architectures):
    from fastbert.testing.shipped_launches import all_launches

    shipped = {launch.name for launch in all_launches()}
    for arch in architectures:
        reached = {name for run in runs if run.arch == arch for name in run.launches}
        assert shipped - reached == WITHOUT_CASE


@pytest.mark.skipif("cuda" not in available(), reason="needs nvcc")
@pytest.mark.every_case
def test_every_cuda_kernel_is_reached(runs):
    reached = {name for run in runs if run.backend == "cuda" for name in run.launches}
    assert reached == {
        "layer_norm.forward_kernel", "layer_norm.backward_kernel", "feed_forward.forward_kernel",
        "feed_forward.backward_kernel", "reduce.sum_partials_kernel",
        "attention_forward.forward_kernel", "attention_forward.persistent_forward_kernel",
        "attention_backward.backward_kernel", "attention_backward.persistent_backward_kernel",
        "gemm.gemm_kernel", "gemm.persistent_gemm_kernel",
    }  # fmt: skip


def row(**changes) -> ParityRow:
    plain = ParityRow(
        "rotary", "strided", "triton", "float32", "out", 1e-7, 1e-7, 1.0, True, "fine", "fastbert"
    )
    return replace(plain, **changes)


def run_of(**changes) -> EmulatedRun:
    plain = EmulatedRun(
        arch="sm_90", op="rotary", case="strided", backend="triton", dtype="float32", schedule=1,
        approximate=0.0, launches={"rotary_forward": 1, "rotary_backward": 2}, seconds=0.5,
        compile_seconds=2.0, rows=[row()], fault="", command="fastbert check --emulate sm_90",
        number=1, total=2,
    )  # fmt: skip
    return replace(plain, **changes)


def test_a_summary_has_the_worst_of_each_group():
    runs = [run_of(), run_of(case="plain", rows=[row(ratio=1.5)]), run_of(arch="sm_80")]
    older, newer = summarize([*runs, run_of(rows=[], fault="PtxFault: race")])
    assert (older["arch"], older["cases"], older["launches"], older["passed"]) == (
        "sm_80", 1, 3, True,
    )  # fmt: skip
    assert (newer["cases"], newer["launches"], newer["ratio"], newer["seconds"]) == (2, 9, 1.5, 1.5)
    assert newer["passed"] is False


def test_a_tensor_beyond_the_tolerance_fails_a_run():
    assert run_of().passed
    assert not run_of(rows=[row(), row(passed=False)]).passed
    assert not run_of(rows=[], fault="PtxFault: race").passed


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection("sm_75"), "arch: got 'sm_75', allowed: sm_80, sm_90"),
        (Selection("sm_80", ("cpu",)), "backend: got 'cpu', allowed: triton, cuda"),
        (Selection("sm_80", ("triton",), op="softmax"), "op: got 'softmax', allowed: attention"),
        long_case(Selection("sm_80", ("triton",), op="bert", random=1), "op: got 'bert'"),
        (Selection("sm_80", ("triton",), approximate=2.0), "approximate: got 2, allowed: -1 to 1"),
    ],
)
def test_unknown_selections(selection, message):
    with pytest.raises(ValueError, match=message):
        list(emulate([selection]))


def test_cuda_needs_nvcc(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="'cuda' cannot run on the PTX machine: nvcc is not on"):
        list(emulate([Selection("sm_90", ("cuda",))]))


def test_a_program_that_dies_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="emulation: "):
        list(emulate([Selection("sm_90", ("triton",))]))


def test_the_interpreter_and_the_machine_exclude_each_other():
    if backends.interpreted():
        with (
            pytest.raises(RuntimeError, match="set TRITON_INTERPRET=0"),
            backends.standing_in("the PTX machine", "triton"),
        ):
            pass
    request = backends.Request("cpu", backends.torch.float32)
    assert backends.refusal("layer_norm", "cuda", request) is not None
    with backends.standing_in("the PTX machine", "cuda"):
        assert backends.refusal("layer_norm", "cuda", request) is None
    assert backends.refusal("layer_norm", "cuda", request) is not None


STORE = "tl.store(y_ptr + offsets, narrow(new_second, dtype), mask=inside)"
LOAD = "second = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (STORE, STORE.replace(", mask=inside", ""), "PtxFault: race: "),
        (LOAD, f"{LOAD} * 1.01", "max error"),
    ],
    ids=["a store without its mask", "a wrong value"],
)
@pytest.mark.every_case
def test_a_broken_kernel_fails_the_command(tmp_path, old, new, message):
    for name in ("fastbert", "kernels"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
    kernel = tmp_path / "kernels" / "rotary.py"
    text = kernel.read_text(encoding="utf-8")
    assert text.count(old) == 1
    kernel.write_text(text.replace(old, new), encoding="utf-8")
    arguments = ["--op", "rotary", "--case", "fused_projection", "--dtype", "float32"]
    command = [sys.executable, "-m", "fastbert", "check", "--emulate", "sm_90", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "300"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1, result.stderr
    assert "1 FAILED" in result.stdout
    assert message in result.stdout
    assert (
        "reproduce: fastbert check --op rotary --case fused_projection --backend triton "
        "--dtype float32 --emulate sm_90 --schedule 1"
    ) in result.stdout
