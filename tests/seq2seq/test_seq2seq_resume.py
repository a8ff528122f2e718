"""An interrupted and resumed run ends with the same model, bit for bit, as a run without a stop."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from _cut_runs import assert_same, cut_run, final
from seq2seq_problems import SMALL, run, write_pairs

from fastbert.seq2seq.seq2seq_run import Seq2SeqRun
from fastbert.training import checkpoints

# An epoch has 4 steps, so that steps 3 and 6 are inside an epoch.
SETTINGS = {"epochs": 2, "save_every": 3, "log_every": 2}


cut = functools.partial(cut_run, Seq2SeqRun, run)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cuts_anywhere_change_no_bit(options_of, monkeypatch, tmp_path, precision):
    settings = {**SETTINGS, "precision": precision}
    whole, _ = run(options_of(output=tmp_path / "whole", **settings))
    assert whole.steps == 8
    options = options_of(output=tmp_path / "cut", **settings)
    for step in (2, 5, 7):
        cut(monkeypatch, options, step)
        # A killed run leaves no figures.
        assert not (options.folder / "metrics.json").exists()
    result, text = run(options)
    assert f"resumed after step 6 of 8, from {options.folder}" in text
    assert_same(final(options.folder), final(tmp_path / "whole"))
    assert result.figures == whole.figures
    assert result.mistakes == whole.mistakes


def test_a_finished_run_stays_as_it_is(options_of):
    options = options_of(**SETTINGS)
    first, _ = run(options)
    expected = final(options.folder)
    again, text = run(options)
    assert "resumed after step 8 of 8" in text
    assert_same(final(options.folder), expected)
    assert (again.figures, again.mistakes) == (first.figures, first.mistakes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"epochs": 3}, "epochs"),
        ({"merges": 4}, "merges"),
        ({"config": {**SMALL["config"], "dropout": 0.2}}, "config"),
        ({"pairs": None, "task": "numbers"}, "task"),
    ],
)
def test_other_options_are_refused_by_name(options_of, changes, name):
    run(options_of(epochs=1))
    with pytest.raises(ValueError, match=rf"^{name}: got .*, but the run in .* has .*; allowed:"):
        run(options_of(**{"epochs": 1, **changes}))


def test_other_pairs_are_refused_unless_the_run_starts_anew(options_of, tmp_path):
    first, _ = run(options_of(epochs=1))
    write_pairs(tmp_path / "pairs.tsv", "wxyz")
    with pytest.raises(ValueError, match=r"^pairs, by their SHA-256: got '[0-9a-f]{64}'"):
        run(options_of(epochs=1))
    again, _ = run(options_of(epochs=1, overwrite=True))
    assert first.figures != again.figures


def test_the_folder_of_another_kind_of_run_is_refused(options_of, monkeypatch):
    options = options_of(epochs=1)
    monkeypatch.setattr(Seq2SeqRun, "task", "classify")
    run(options)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"^kind of run: got 'seq2seq', but the run in .* 'classi"):
        run(options)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(options_of, tmp_path):
    run(options_of(output=tmp_path / "whole", **SETTINGS))
    options = options_of(**SETTINGS)
    run(options)
    broken = checkpoints.folder_of(options.folder, 8) / "weights.safetensors"
    content = bytearray(broken.read_bytes())
    content[len(content) // 2] ^= 1
    broken.write_bytes(content)
    _, text = run(options)
    assert f"damaged checkpoint, an earlier one is tried: {broken}: its checksum" in text
    assert "resumed after step 6 of 8" in text
    assert_same(final(options.folder), final(tmp_path / "whole"))


def test_a_loss_that_is_not_finite_names_the_batch(options_of, monkeypatch, tmp_path):
    options = options_of(**SETTINGS)
    original = Seq2SeqRun.update

    def update(self, features):
        if self.step == 5:
            with torch.no_grad():
                self.model.head.bias.fill_(float("nan"))
        return original(self, features)

    monkeypatch.setattr(Seq2SeqRun, "update", update)
    with pytest.raises(RuntimeError) as failure:
        run(options)
    text = str(failure.value)
    assert "the loss or the gradient of batch 1 of epoch 1 is not finite at step 6: " in text
    assert text.count(f"{tmp_path / 'pairs.tsv'}, line ") == 14
    assert checkpoints.newest(options.folder, pytest.fail).content["step"] == 4


def test_a_signal_ends_the_command_with_a_checkpoint_and_its_status(tmp_path):
    pairs, output = write_pairs(tmp_path / "pairs.tsv", "abcd"), tmp_path / "out"
    arguments = ("--pairs", pairs, "-o", output, "--epochs", 100_000, "--log-every", 1)
    command = (sys.executable, "-m", "fastbert", "seq2seq", "train", *map(str, arguments))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "500"}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        deadline = time.monotonic() + 300
        log = output / "log.jsonl"
        while not log.exists() or log.read_bytes().count(b"\n") < 3:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        text = process.communicate(timeout=300)[0]
    assert process.returncode == 128 + signal.SIGTERM, text
    step = checkpoints.newest(output, pytest.fail).content["step"]
    assert f"stopped by SIGTERM after step {step} of " in text
    assert {path.name for path in output.iterdir()} == {
        *("model", "checkpoints", "log.jsonl", "curves.png"),
    }
