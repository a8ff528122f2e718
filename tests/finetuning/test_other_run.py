"""Fine-tuning refuses the folder of a pre-training run, and pre-training a fine-tuning folder.

The message names the kind of run in the folder, and the folder does not change.
"""

from __future__ import annotations

import pytest
from finetuning_problems import reviews, run, write_rows
from rich.console import Console

from fastbert.data import stories
from fastbert.finetuning.finetuning_run import FinetuningRun
from fastbert.training import PretrainOptions, pretrain


@pytest.fixture
def pretrain_in(tmp_path):
    def call(**changes):
        options = PretrainOptions(
            output=tmp_path / "out",
            preset="tiny",
            config={"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32},
            vocab_size=200,
            max_length=24,
            tokens_per_batch=96,
            steps=2,
            **changes,
        )
        return pretrain(options, documents=list(stories(20, 0)), console=Console(quiet=True))

    return call


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "train.csv", reviews(16, 0))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_pretraining_refuses_a_folder_of_finetuning(classify, data, pretrain_in, tmp_path):
    run(classify(data, epochs=1))
    before = contents(tmp_path / "out")
    wanted = r"^task: got 'pre-training', but the run in .* has 'classify'; allowed: the same, an"
    with pytest.raises(ValueError, match=wanted):
        pretrain_in()
    assert contents(tmp_path / "out") == before
    pretrain_in(overwrite=True)


def test_finetuning_refuses_a_folder_of_pretraining(classify, data, pretrain_in, tmp_path):
    pretrain_in()
    before = contents(tmp_path / "out")
    wanted = r"^task: got 'classify', but the run in .* has 'pre-training'; allowed: the same, ano"
    with pytest.raises(ValueError, match=wanted):
        run(classify(data, epochs=1))
    assert contents(tmp_path / "out") == before


def test_a_second_run_into_the_folder_of_a_run_is_refused(
    classify, data, pretrain_in, tmp_path, monkeypatch
):
    options, original, refused = classify(data, epochs=1), FinetuningRun.update, []

    def update(self, features):
        if not refused:
            before = contents(tmp_path / "out")
            for second in (pretrain_in, lambda: run(options)):
                with pytest.raises(ValueError, match=rf"^output: another run .*{tmp_path}/out, al"):
                    second()
                refused.append(second)
            assert contents(tmp_path / "out") == before
        return original(self, features)

    monkeypatch.setattr(FinetuningRun, "update", update)
    run(options)
    assert len(refused) == 2
