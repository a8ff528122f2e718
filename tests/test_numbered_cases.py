"""The thirty numbered bugs of other libraries each have a test; this file has some of the tests.

The names of tests in tests/ops/test_regressions.py contain the numbers of the bugs.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastbert.ops import backend as backends

TESTS = Path(__file__).parent
REGRESSIONS = "ops/test_regressions.py"
ATTENTION = "kernels/test_attention_kernels.py"

# Number of a bug → file → names of tests, or the beginning of names if they end in *.
TABLE = {
    1: {REGRESSIONS: "test_01_*", ATTENTION: "test_fully_masked_rows_are_exactly_zero"},
    2: {REGRESSIONS: "test_02_*", ATTENTION: "test_every_way_to_write_a_mask_agrees"},
    3: {REGRESSIONS: "test_03_*", ATTENTION: "test_poison_in_unattended_keys_stays_there"},
    4: {REGRESSIONS: "test_04_*", "modules/test_masks.py": "test_slack_behind_packed_*"},
    5: {REGRESSIONS: "test_05_*"},
    6: {REGRESSIONS: "test_06_*", "modules/test_masks.py": "test_a_sequence_without_tokens"},
    7: {
        REGRESSIONS: "test_07_* test_06_07_*",
        ATTENTION: "test_empty_*",
        "kernels/test_feed_forward_kernels.py": "test_empty_sizes",
        "kernels/test_cross_entropy_kernels.py": "test_empty_sizes",
    },
    8: {REGRESSIONS: "test_08_*", ATTENTION: "test_dense_against_oracle"},
    9: {"kernels/test_large_offsets.py": "test_offsets_*", "kernels/test_aot.py": "test_every_*"},
    10: {REGRESSIONS: "test_10_*", "kernels/test_embedding_kernels.py": "test_strided_*"},
    11: {REGRESSIONS: "test_11_*"},
    12: {REGRESSIONS: "test_12_*", "kernels/test_layer_norm_kernels.py": "test_strided_and_*"},
    13: {REGRESSIONS: "test_13_*", "kernels/test_philox.py": "test_kept_fraction_is_binomial"},
    14: {REGRESSIONS: "test_14_*", "modules/test_running.py": "test_checkpointing_*"},
    15: {"inference/test_graphs.py": "test_cuda_graphs"},
    16: {REGRESSIONS: "test_16_*", ATTENTION: "test_dropout_of_everything_and_of_nothing"},
    17: {REGRESSIONS: "test_17_*", ATTENTION: "test_reruns_and_batches_agree_bitwise"},
    18: {REGRESSIONS: "test_18_*"},
    19: {REGRESSIONS: "test_19_*"},
    20: {"ops/test_registration.py": "test_opcheck*"},
    21: {REGRESSIONS: "test_21_*", "ops/test_registration.py": "test_autocast"},
    22: {REGRESSIONS: "test_22_*", "ops/test_registration.py": "test_double_backward_*"},
    23: {
        "kernels/test_feed_forward_kernels.py": "test_every_tile_of_the_gemm",
        "kernels/test_attention_short.py": "test_each_*_tile_alone",
    },
    24: {"test_numbered_cases.py": "test_24_*"},
    25: {"test_numbered_cases.py": "test_25_*"},
    26: {"csrc/test_isa.py": "test_no_instruction_above_the_baseline_*"},
    27: {"csrc/test_isa.py": "test_works_in_a_child_* test_import_leaves_*"},
    28: {REGRESSIONS: "test_28_*", ATTENTION: "test_logits_of_ten_thousand"},
    29: {REGRESSIONS: "test_29_*", "kernels/test_cross_entropy_kernels.py": "test_no_label"},
    30: {"io/test_hostile_files.py": "test_safetensors test_a_pickle_* test_a_path_*"},
}


@pytest.mark.parametrize("number", range(1, 31))
def test_the_case_has_its_tests(number):
    for file, patterns in TABLE[number].items():
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        for pattern in patterns.split():
            assert any(Path(name).match(pattern) for name in names), f"{file}: {pattern}"


@pytest.mark.skipif(not backends.HAS_TRITON, reason="needs triton")
@pytest.mark.every_case
def test_24_processes_that_compile_into_one_cache_survive_the_death_of_one(tmp_path):
    command = [sys.executable, "-m", "fastbert.testing.ahead_of_time", "--processes", "1"]
    command += ["--arch", "90", "--noun", "reduction", "--only", "sum_partials"]
    environment = backends.compiler_environment(tmp_path)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    def start(**options):
        return subprocess.Popen(command, env=environment, text=True, **options)

    victim = start(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    others = [start(**pipes) for _ in range(2)]
    deadline = time.monotonic() + 60
    while not any(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    # The process is killed while it writes, together with its compiler processes.
    signal_group(victim)
    results = []
    for process in others:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors[-2000:]
        results.append([json.loads(line) for line in out.splitlines()])
    assert results[0]
    assert results[0] == results[1]
    after = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in after.stdout.splitlines()] == results[0]


def signal_group(process: subprocess.Popen) -> None:
    """Kill the process group of `process`, which was started in a separate session."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_25_an_extension_of_another_torch_is_refused_in_words(monkeypatch):
    stale = SimpleNamespace(build_info=lambda: {"torch": "1.13.0", "cuda": False})
    monkeypatch.setattr(backends.importlib, "import_module", lambda name: stale)
    extension, why = backends._load_extension()
    assert extension is None
    assert "built for torch 1.13.0" in why
    assert "reinstall fastbert" in why
